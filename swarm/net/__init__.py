"""The network: messages, signatures, sessions, HTTP, streams and links."""
