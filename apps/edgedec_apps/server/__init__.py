"""The server: OpenAI's and ollama's HTTP interfaces on one engine, and a web chat; `edgedec serve`.

A request's way: guard.py (who may ask) → openai_api.py or ollama_api.py (what is asked, as a generation.Asked) →
reply.py (the queue, time, disconnects) → generation.py (the engine, in a thread) → a dialect (the answer's form).
"""
