"""What all interfaces of the server share, from the fields of a request to the parts of an answer."""
