"""What MindSpeed's op builders give on platform cpu instead of the C++ that they compile: see loader.py."""
