"""How fast the pages are in a browser, and the pictures in the docs."""
