import logging

# Where the home folder is read-only, matplotlib warns in two lines that it makes a temporary folder for its cache.
logging.getLogger("matplotlib").setLevel(logging.ERROR)
