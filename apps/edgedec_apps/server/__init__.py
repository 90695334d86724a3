"""The server of `edgedec serve`: OpenAI's and ollama's HTTP interfaces on one engine, and a web chat.

A request passes guard.py (may this client use the server?), openai_api.py or ollama_api.py (which texts does it want,
as a generation.TextRequest), reply.py (queue, time limit, disconnects), generation.py (the engine, in a thread), and a
dialect (the form of the answer: openai_forms.py, ollama_forms.py).
"""
