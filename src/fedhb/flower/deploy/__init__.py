"""A federation on Flower, made ready (`app_files`) and tried on this machine (`local_federation`)."""
