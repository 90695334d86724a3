"""The commands of `edgedec`, one file each: the options, the help text, and what the command does.

`command` in a file is the function that typer calls; in the file of a group, such as `cache`, it maps the name of each
command to its function. A file is imported when its command is used, and it imports numpy and the engine only inside
the functions that need them, so that --help is fast. The parameters of a command are its options: the limit on the
number of parameters of a function does not hold for them.
"""

_LINES = """
run: Run a model on a prompt: text goes to standard output, all else to standard error.
chat: Talk with a model. From a pipe, each line is a message.
map: Ask a model the same of each row of a file: a JSON object a line, in the order of the rows.
embed: Make a vector of length 1 of each text; standard output gets a JSON array of numbers a line.
rank: Rank documents by how well they match a query, the best first: a score and a document a line.
serve: Serve models over HTTP: OpenAI's and ollama's interfaces, and a web chat at /.
launch: Start a coding agent on a model of this machine: a server, the agent's settings, and the agent.
ps: List the models that a running server has loaded.
stop: Unload a model from a running server, after its requests have ended.
extract: Quote the stretches of a text that most probably answer a question, with their probabilities.
methods: List other ways to write a text, and drafters: whom each is for, and what was measured of it.
bench: Measure how fast a model decodes with drafts and without, per task, and whether the texts are equal.
eval: Measure what a KV type, left-out layers or another file cost in quality and bring in speed.
tune-skip: Search for the half-layers that a model drafts best without, and keep the set for --draft skip.
learn: Learn your own files, from which drafts come: code and documents that a model's texts will resemble.
train-drafter: Train a drafter for a model on the model's own answers; the same command resumes.
export: Export a model to a folder that onnxruntime runs, here or on another device; or to another GGUF.
plan: Show the memory that a model will need, what changes to fit --memory, and what else would fit.
pull: Download a model or a draft head, or resume its download, and check it.
create: Make a preset: a name for a model with its own system message, template, options, adapters or head.
list: List the models on this machine, and models to download that edgedec was tried with.
search: Search the catalogue and the Hugging Face hub for models in GGUF files, by words of their names.
rm: Delete a model and its tiles from the cache, or a preset; files elsewhere are never deleted.
info: Show a model's architecture, quantization, context, memory, runtimes; or a head's or projector's card.
doctor: Show what this machine has, and which runtimes work; --all shows devices, plug-ins and versions, too.
cache: List, check and delete the files of the tile cache.
uninstall: Show what edgedec keeps on this machine, delete it if asked to, and say how to remove the program.
"""
SUMMARIES = dict(line.split(": ", 1) for line in _LINES.strip().splitlines())
"""The first line of each command's help, in the order of `edgedec --help`, which imports no command."""

ALIASES = {"show": "info", "ls": "list"}
"""Further names of commands, which the help does not list."""
