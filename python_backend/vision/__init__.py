"""The vision encoder: image bytes to features, by one of several runtimes."""
