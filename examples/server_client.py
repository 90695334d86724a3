"""A client of `edgedec serve MODEL`, by OpenAI's library (pip install openai): python server_client.py "Hello" [URL]"""

import sys

from openai import APIConnectionError, OpenAI


def main(question: str, url: str = "http://127.0.0.1:8080/v1", key: str = "none") -> None:
    """Print an answer as it comes, and what it took."""
    with OpenAI(base_url=url, api_key=key) as client:
        model = client.models.list().data[0].id
        with client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            max_tokens=300,
            stream=True,
            stream_options={"include_usage": True},
        ) as stream:
            for event in stream:
                for choice in event.choices:
                    print(choice.delta.content or "", end="", flush=True)
                if event.usage is not None:
                    print(f"\n[{model}: {event.usage.completion_tokens} tokens]", file=sys.stderr)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except APIConnectionError:
        sys.exit("no server answers there; start one first: edgedec serve smollm2-135m")
