"""What happens to uploads: its costs."""
