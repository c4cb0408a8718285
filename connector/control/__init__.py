"""The control plane with its sockets: P's service and its server thread, D's claims and their client thread."""
