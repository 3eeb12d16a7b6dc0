"""Measurements of real sites."""
