"""The `vlm-relay` command: build what is missing, start the server, stop it cleanly."""
