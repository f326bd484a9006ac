"""What a user runs: client library and command line for a vlm-relay server."""
