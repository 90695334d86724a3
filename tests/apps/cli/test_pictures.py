"""Pictures at the command line: asked about, attached in a chat, planned for; named in what is told and saved."""

import json
from pathlib import Path

import pytest
from support.models.seeing_model import picture, seeing_model
from support.processes.command_line import Terminal, run_here

from edgedec_apps.cli.pictures import dropped

SHORT = ("-t", "0", "-n", "4", "--method=ignore-end")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that reads pictures, with two pictures beside it."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python encodes the pictures")
    pytest.importorskip("PIL", reason="Pillow decodes the pictures")
    folder = tmp_path_factory.mktemp("seeing")
    (folder / "red.png").write_bytes(picture("red"))
    (folder / "a blue one.png").write_bytes(picture("blue", (60, 20)))
    return seeing_model(folder)


def test_what_is_dropped_onto_a_terminal(tmp_path: Path) -> None:
    """Whole paths of pictures at the beginning of a line, quoted or not, are files; all else is a message."""
    first, second = tmp_path / "a b.png", tmp_path / "c.JPG"
    for path in (first, second):
        path.write_bytes(b"x")
    assert dropped(f"'{first}'") == ([first], "")
    escaped = str(first).replace(" ", "\\ ")
    assert dropped(f"{escaped} {second}  What's this?") == ([first, second], "What's this?")
    assert dropped(f"file://{second} x") == ([second], "x")
    for text in (f"What is {second}?", f"{tmp_path}/no.png", str(tmp_path), "c.JPG", "'", "/help me", "It's"):
        assert dropped(text) == ([], text)


def test_pictures_need_a_prompt_and_a_file(model: Path, tmp_path: Path) -> None:
    """What is missing is told before a model is loaded; a model that reads no pictures names what it needs."""
    run_here("run", model, "x", "-i", tmp_path / "no.png").failed(60, "no.png can't be read")
    run_here("run", model, "x", "-i", tmp_path).failed(60, "is a directory")
    run_here("run", model, "x", "--raw", "-i", tmp_path / "no.png").failed(40, "leave out --raw")
    (tmp_path / "a.png").write_bytes(b"x")
    run_here("run", model, "x", "-i", tmp_path / "a.png").failed(40, "mmproj*.gguf", "--method pictures:")
    run_here("plan", model, "-i", tmp_path / "a.png").failed(40, "mmproj*.gguf", "--method pictures:")


@pytest.mark.slow
def test_a_prompt_about_pictures(seeing: Path) -> None:
    """The pictures come before the prompt; JSON names them with size and tokens, which are those of the prompt."""
    red, blue = seeing.parent / "red.png", seeing.parent / "a blue one.png"
    plain = json.loads(run_here("run", seeing, "What?", *SHORT, "--json").out)
    found = run_here("run", seeing, "What?", "-i", red, "-i", blue, *SHORT, "--json")
    assert found.code == 0, found
    document = json.loads(found.out)
    first, second = document["pictures"]
    assert (first["name"], first["width"], first["height"]) == (str(red), 48, 40)
    assert (second["name"], second["width"], second["height"]) == (str(blue), 60, 20)
    n_rows = first["n_tokens"] + second["n_tokens"]
    assert document["stats"]["n_prompt_tokens"] > plain["stats"]["n_prompt_tokens"] + n_rows
    shown = run_here("run", seeing, "What?", "-i", red, "-i", blue, *SHORT, "--explain")
    assert shown.text.removesuffix("\n") == document["text"].removesuffix("\n")
    assert f"picture {blue}: 60 x 20, {second['n_tokens']} tokens" in " ".join(shown.err.split())
    fewer = json.loads(
        run_here("run", seeing, "What?", "-i", red, "--method", "pictures:max-tokens=4", *SHORT, "--json").out
    )
    assert fewer["pictures"][0]["n_tokens"] < first["n_tokens"]
    run_here("run", seeing, "What?", "-i", red, "--method", "pictures:off").failed(40, "--method pictures:projector")
    planned = json.loads(run_here("plan", seeing, "-i", red, "--json").out)
    assert planned["pictures"] == [first]
    assert f"{red}: 48 x 40, {first['n_tokens']} tokens" in run_here("plan", seeing, "-i", red).text


@pytest.mark.slow
def test_pictures_in_a_chat(seeing: Path, tmp_path: Path) -> None:
    """/image attaches to the next message; a saved chat names the file, and reads it again, or says that it is gone."""
    red = tmp_path / "red.png"
    red.write_bytes(picture("red"))
    saved = tmp_path / "chat.json"
    lines = [f"/image '{red}'", "What?", "And?", f"/save {saved}"]
    result = run_here("chat", seeing, *SHORT, stdin="\n".join(lines).encode())
    assert result.code == 0, result
    assert f"(picture {red}: 48 x 40, " in result.err
    content = json.loads(saved.read_text())["messages"][0]["content"]
    assert content == [{"type": "image", "image": str(red)}, {"type": "text", "text": "What?"}]
    question = json.loads(saved.read_text())["messages"][2]["content"]
    assert question == "And?"
    again = run_here("chat", seeing, *SHORT, stdin=f"/load {saved}\n/regen\n".encode())
    assert again.code == 0, again
    assert result.text.splitlines()[-1:] == again.text.splitlines()[-1:]
    red.unlink()
    run_here("chat", seeing, *SHORT, stdin=f"/load {saved}\n".encode()).failed(60, "red.png can't be read")


@pytest.mark.slow
def test_a_picture_is_dropped_onto_the_terminal(seeing: Path) -> None:
    """Its path, as the terminal types it, attaches it; a file that is no picture is refused, and the chat goes on."""
    blue = seeing.parent / "a blue one.png"
    wrong = seeing.parent / "wrong.png"
    wrong.write_bytes(b"no picture")
    with Terminal("chat", seeing, *SHORT) as person:
        person.expect(">>>")
        person.send(f"'{wrong}'\n", "edgedec: ", ">>>")
        person.send(f"'{blue}'\n", "it comes before your next message", ">>>")
        person.send("What?\n", "4 tokens (length)")
