"""A federation on Flower, made ready: certificates, keys, the app and its configuration (`files`), and started here to try it out
(`up`)."""
