"""The server of `edgedec serve`: the HTTP interfaces of OpenAI, Anthropic, ollama and llama-server, and a web chat.

A request passes guard.py (may this client use the server?), the handlers of its interface such as server/openai/api.py
(which texts does it want, as a generation.TextRequest), server/core/answer.py (the model, time limit, disconnects),
server/core/reply.py (queue), server/core/generation.py (the engine, in a thread), and a dialect (the form of the
answer, such as ChatForm of server/openai/api.py). docs/server.md has the rest.
"""
