"""llama.cpp's RPC: layers of a model on other machines, each of which runs llama.cpp's rpc-server."""
