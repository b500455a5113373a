"""What a profile says: on a page with pictures, in a terminal, side by side and as a list."""
