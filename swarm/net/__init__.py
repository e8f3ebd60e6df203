"""What is on the wire and between sockets: messages, signatures, sessions, HTTP, streams and links."""
