"""Where each stage runs and which replica serves a request: decisions as pure Python."""
