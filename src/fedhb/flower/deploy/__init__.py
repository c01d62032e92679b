"""A federation on Flower: its files (`app_files`), and a trial on this machine."""
