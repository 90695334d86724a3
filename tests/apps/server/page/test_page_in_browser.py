"""The web chat in a real browser: what it shows, sends and saves, by keyboard alone, at several sizes."""

import io
import json
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models.saying_model import saying_model
from support.models.tiny_models import tiny_llama
from support.processes.browser import Browser
from support.processes.running_server import CHAT, PATIENCE_S, Running, started
from support.texts.pdf_files import pdf_of

from edgedec.errors import CancelledError
from edgedec.progress import CancelToken
from edgedec_apps.server.registry.models import Prepare, Prepared, Recipe

pytestmark = pytest.mark.slow

THINKS = (
    "{# <think> #}{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CODE = 'def square(x):\n    # a "comment"\n    return x * 12\n'
PIECES = ("<think>", "They want", " code.", "</think>", "Here **it** is:\n\n", "```python\n")
ENDLESS, BROKEN = "endless", "broken"
NEVER = (sys.executable, "-c", "import sys; print([0.25]); print('no tests', file=sys.stderr)")
SIZES = {"wide": (1200, 800), "tablet": (800, 1000), "phone": (390, 780)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a model whose answer is known, with three others on the machine: random, endless, and damaged."""
    root = tmp_path_factory.mktemp("page")
    models = root / "models"
    models.mkdir()
    lines = CODE.splitlines(keepends=True)
    says = {"": [*PIECES, *lines, "```\n"]}
    known = saying_model(root / "known.gguf", says, chat_template=THINKS)
    tiny_llama(models / "random.gguf", n_layer=1, n_ctx_train=4096, chat_template=CHAT)
    saying_model(models / f"{ENDLESS}.gguf", {"": ["go "], "go ": ["go "]}, chat_template=CHAT, n_ctx_train=100_000)
    (models / f"{BROKEN}.gguf").write_bytes((models / "random.gguf").read_bytes()[:-5000])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEDEC_CACHE", str(root))
        patch.setenv("EDGEDEC_CONFIG", str(root))
        patch.delenv("EDGEDEC_MODELS", raising=False)
        load_options = {"draft": "suffix", "n_ctx": 4096}
        with started(known, n_parallel=4, load_options=load_options, checks={"never": NEVER}) as running:
            yield running


@pytest.fixture
def page(chromium: Browser, server: Running) -> Iterator[Browser]:
    """The page as on a first visit; at the end it must not have complained."""
    chromium.resize(*SIZES["wide"])
    chromium.color_scheme("light")
    chromium.open(server.url)
    yield chromium
    assert chromium.problems() == []


def give_file(page: Browser, tmp_path: Path, name: str, data: bytes) -> None:
    """Choose a file for the next message, and wait until it is read or refused."""
    path = tmp_path / name
    path.write_bytes(data)
    page.find("#file").send_keys(str(path))
    page.wait(lambda: page.run("return !document.querySelector('#files').hasAttribute('aria-busy')"), "still reading")


# Answers


def test_an_answer_with_thoughts_and_code(page: Browser) -> None:
    """Thoughts are folded, code has its language and colors, and its button copies exactly the code."""
    page.ask("Write a function.")
    assert page.text(".message.user .text") == "Write a function."
    assert page.text(".message.assistant .who") == "known"
    assert page.text(".thoughts") == "They want code."
    assert not page.find(".thoughts").is_displayed()
    page.find(".thinking summary").click()
    assert page.find(".thoughts").is_displayed()
    assert page.text(".message.assistant strong") == "it"
    assert (page.text(".code-head span"), page.text(".code code")) == ("python", CODE.rstrip())
    colored = page.run(
        "return [...document.querySelectorAll('code span')].map((n) => n.className + ':' + n.textContent)"
    )
    assert colored == ["keyword:def", "call:square", 'comment:# a "comment"', "keyword:return", "number:12"]
    page.find(".copy-code").click()
    page.wait(lambda: page.text(".copy-code") == "Copied", "not copied")
    assert page.text("#announce").startswith("Answer: Here **it** is:")


def test_what_is_copied_can_be_pasted(page: Browser) -> None:
    """By keyboard: Alt+C copies the last block of code, Ctrl+V pastes it into the message box."""
    from selenium.webdriver import ActionChains, Keys

    page.ask("Write a function.")
    page.press("c", alt=True)
    page.wait(lambda: page.text(".copy-code") == "Copied", "not copied")
    page.press("p", alt=True)
    ActionChains(page.driver).key_down(Keys.CONTROL).send_keys("v").key_up(Keys.CONTROL).perform()
    page.wait(lambda: page.find("#prompt").get_property("value"), "nothing pasted")
    assert page.find("#prompt").get_property("value") == CODE.rstrip()


def test_what_drafting_did_is_said_and_drawn(page: Browser, server: Running) -> None:
    """The same answer again is drafted from the first: the note, the sentence and the server's counts agree."""
    page.ask("Once.")
    page.find("#new").click()
    page.ask("Once.")
    words = page.text(".why p")
    pattern = r"(\d+) tokens · .*Drafting guessed (\d+) tokens, and the model agreed with (\d+) of them.*"
    found = re.fullmatch(pattern, page.text(".note") + words)
    assert found is not None, words
    n, drafted, accepted = map(int, found.groups())
    assert 0 < accepted <= drafted
    assert f"it ran about {max(1, n - accepted)} times for {n} tokens. The text is the same as without drafts." in words
    assert page.text(".why ul").count("suffix: ") >= 1
    assert page.find(".why").get_property("open") is False, "what explains the speed is folded until somebody wants it"
    assert page.text(".why summary") == "Why this speed"
    for sentence in re.split(r"[.:;]", page.text(".note") + "." + words):
        assert len(re.findall("draft", sentence, re.IGNORECASE)) < 2, sentence


FAST: dict[str, Any] = {"predicted_n": 20, "speed": 31.25}
LINES: list[tuple[dict[str, Any], str]] = [
    (FAST | {"gain": 2.44}, "20 tokens · 31.3 tokens/s · 2.4 times as fast as without drafts"),
    (FAST | {"gain": 1.04, "draft_n": 9}, "20 tokens · 31.3 tokens/s"),
    (FAST | {"gain": 0.8, "draft_n": 9}, "20 tokens · 31.3 tokens/s"),
    ({"predicted_n": 20, "gain": None, "reason": "length"}, "20 tokens · cut off at the limit"),
    ({"predicted_n": 1, "reason": "stopped"}, "1 token · stopped"),
    ({"reason": "stopped"}, "stopped"),
    ({}, ""),
]


def test_one_line_says_what_an_answer_took(page: Browser) -> None:
    """Tokens, speed, and the gain of drafts where there was one; where there was none nothing is said of drafts."""
    script = "args[0].map((meta) => m.summary(meta))"
    assert page.module("/static/messages.js", script, [meta for meta, _ in LINES]) == [line for _, line in LINES]


def test_drafting_that_is_off_says_so(page: Browser) -> None:
    """With drafting off in the settings the request says so, and the answer why nothing was drafted."""
    page.press("s", alt=True)
    page.run("document.querySelector('#settings [name=draft]').value = 'off'")
    page.find("#settings [value=save]").click()
    page.record_requests()
    page.ask("Once.")
    assert page.sent[0]["speculative"] == {"draft": "off"}
    assert page.text(".why p").endswith("the model ran once for each token. Drafting is off in the settings.")


def test_the_graph_is_of_the_samples(page: Browser) -> None:
    """Speed and acceptance between samples, as steps from zero; a label says the same to who can't see."""
    samples = [[0, 1, 0, 0], [0.5, 11, 8, 4], [1.0, 51, 8, 4]]
    meta = {"samples": samples, "draft_n": 8, "draft_n_accepted": 4, "predicted_n": 51}
    rates = page.module("/static/drafting.js", "m.rates(args[0].samples)", meta)
    assert rates == [
        {"from": 0, "to": 0.5, "speed": 20, "accepted": 0.5},
        {"from": 0.5, "to": 1, "speed": 80, "accepted": None},
    ]
    svg = page.module("/static/drafting.js", "m.graph(args[0])[0].outerHTML", meta)
    label = "80.0 tokens per second at the end, at most 80.0; 50 % of the drafted tokens were accepted"
    assert f'aria-label="{label}"' in svg
    assert 'points="58.0,58.0 58.0,45.0 166.0,45.0 166.0,6.0 274.0,6.0 274.0,58.0"' in svg  # 20 is a quarter of 80
    assert ">80 tok/s<" in svg
    assert page.module("/static/drafting.js", "m.graph({samples: [[0, 1, 0, 0], [1, 2, 0, 0]]})") == []
    many = "args[0].forEach((i) => m.sample(Object.assign(meta, {predicted_n: i}), 300 * i))"
    script = f"{{ const meta = {{}}; {many}; return meta.samples; }}"
    kept = page.module("/static/drafting.js", script, list(range(1, 500)))
    assert len(kept) <= 80
    assert (kept[0][1], kept[-1][1]) == (1, 499)


def test_an_answer_is_stopped_by_escape(page: Browser, server: Running) -> None:
    """Escape ends an answer that has no end; what came stays, and the server is free again."""
    pick(page, ENDLESS)
    page.find("#prompt").send_keys("Go", "\ue007")
    page.wait(lambda: len(page.text(".answer .text")) > 40, "no text comes")
    page.wait(lambda: page.shown(".why summary"), "nothing explains the speed while text comes")
    page.press("\ue00c")
    page.wait_idle()
    assert "stopped" in page.text(".note")
    assert page.text(".answer .text").startswith("go go")
    assert page.focused == "prompt"
    queue = server.service.registry.entry(server.service.names.find(ENDLESS).recipe).queue
    page.wait(lambda: queue.n_running == 0, "the server goes on")


def pick(page: Browser, name: str) -> None:
    """Pick a model in the list."""
    page.run(
        "const m = document.querySelector('#model'); m.value = arguments[0]; m.dispatchEvent(new Event('change'))", name
    )
    assert page.find("#model").get_property("value") == name


def load(page: Browser, name: str) -> None:
    """Press the button of a model's row, by keyboard."""
    page.wait(lambda: page.all(f'#models [value="{name}"]'), "no list")
    page.run('document.querySelector(`#models [value="${arguments[0]}"]`).focus()', name)
    page.press("\n")


# Several answers


def test_answers_side_by_side(page: Browser) -> None:
    """Three answers stand in columns of one width; the chosen one is what the conversation goes on with."""
    page.set(model="random", max_tokens="30", temperature="1", seed="1", count="3")
    page.record_requests()
    page.ask("Say something.")
    assert page.sent[0]["n"] == 3
    places = "return [...document.querySelectorAll('.answer')].map((node) => node.getBoundingClientRect().toJSON())"
    boxes = page.run(places)  # at once, as the page may scroll between two questions
    assert len({(box["y"], box["width"]) for box in boxes}) == 1
    assert [box["x"] for box in boxes] == sorted({box["x"] for box in boxes})
    texts = page.run("return [...document.querySelectorAll('.answer .text')].map((node) => node.textContent)")
    assert len(set(texts)) == 3
    page.all(".choose")[1].click()
    pressed = [node.get_attribute("aria-pressed") for node in page.all(".choose")]
    assert pressed == ["false", "true", "false"]
    answers = json.loads(page.run("return localStorage['edgedec.conversations']"))[0]["messages"][1]
    page.set(model="random", max_tokens="30", count="1")
    page.record_requests()
    page.ask("Go on.")
    assert page.sent[0]["messages"][1] == {"role": "assistant", "content": answers["answers"][1]["content"]}
    assert "n" not in page.sent[0]
    page.resize(*SIZES["phone"])
    assert len({node.rect["x"] for node in page.all(".answers.several .answer")}) == 1  # one below the other


def test_an_answer_is_refined_by_a_check_of_the_server(page: Browser) -> None:
    """The page names the check and knows no command; the answer comes whole, with what the check said of each text."""
    page.set(model="random", max_tokens="5", temperature="1", seed="1", count="3")
    assert page.run("return [...document.querySelector('#check').options].map((each) => each.value)") == ["", "never"]
    page.run("document.querySelector('#check').value = 'never'")
    page.record_requests()
    page.ask("Say something.")
    assert page.sent[0]["refine"] == {"check": "never", "n": 4}
    assert not {"n", "stream", "tools"} & page.sent[0].keys()
    assert len(page.all(".answer")) == 1
    (answer,) = json.loads(page.run("return localStorage['edgedec.conversations']"))[0]["messages"][1]["answers"]
    assert answer["content"] == page.text(".answer .text")
    assert any(line.startswith("refined: text 1 of 17") for line in answer["meta"]["explanation"])
    page.run("document.querySelector('#check').value = ''")
    page.ask("Go on.")
    assert page.sent[1]["stream"]


# Models


def test_a_model_is_loaded_on_demand(page: Browser, server: Running) -> None:
    """The list has all models; "Load" loads one, and a message loads one that is not loaded."""
    server.client.post("/api/generate", json={"model": "random", "keep_alive": 0})
    page.open(server.url)
    names = page.run("return [...document.querySelector('#model').options].map((each) => each.value)")
    assert names == ["known", BROKEN, ENDLESS, "random", ""]
    assert page.text("#model option") == "known"
    pick(page, "random")
    assert page.text("#state") == "It is loaded when you write."
    load(page, "random")
    page.wait(lambda: page.text("#state") == "4,096 tokens of context", "not loaded")
    page.wait(lambda: page.text('#models [value="random"]') == "In use", "the list does not say so")
    assert "random" in server.loaded
    server.client.post("/api/generate", json={"model": "random", "keep_alive": 0})
    page.set(model="random", max_tokens="9")
    page.ask("Hello")
    assert page.text(".message.assistant .who") == "random"
    assert "random" in server.loaded
    page.driver.refresh()
    page.wait(lambda: page.text("#state").endswith("of context"), "not ready")
    assert page.find("#model").get_property("value") == "random"  # the choice is kept


def test_a_load_is_cancelled(chromium: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a model loads, its row counts the seconds; the same button ends the load, in the server, too."""
    (tmp_path / "models").mkdir()
    tiny_llama(tmp_path / "models" / "slow.gguf", n_layer=1, chat_template=CHAT)
    monkeypatch.setenv("EDGEDEC_CACHE", str(tmp_path))
    ended = threading.Event()

    def adapt(prepare: Prepare) -> Prepare:
        def slow(recipe: Recipe, n_ctx: int | None, cancel: CancelToken) -> Prepared:
            with cancel.calling(ended.set):
                assert ended.wait(PATIENCE_S)
            raise CancelledError("loading: cancelled")

        return slow

    with started(adapt=adapt) as running:
        chromium.resize(*SIZES["wide"])
        chromium.open(running.url)
        chromium.wait(lambda: chromium.text("#state") == "It is loaded when you write.", "no model")
        chromium.find("#prompt").send_keys("Hi")
        chromium.press("\n")
        counted = re.compile(r"(waiting for the model:|loading,) [1-9][0-9]* s")
        chromium.wait(lambda: counted.fullmatch(chromium.text(".message .note")), "no seconds of an answer")
        chromium.press("\ue00c")  # Escape
        chromium.wait_idle()
        assert chromium.text(".message .note") == "stopped"
        assert ended.wait(PATIENCE_S)
        ended.clear()
        chromium.find("#new").click()
        load(chromium, "slow")
        chromium.wait(lambda: counted.fullmatch(chromium.text(".how-far")), "no seconds of a load")
        assert chromium.text('#models [value="slow"]') == "Cancel"
        chromium.press("\n")
        chromium.wait(lambda: chromium.text("#announce") == "slow was not loaded: cancelled", "not cancelled")
        chromium.wait(lambda: chromium.text('#models [value="slow"]') == "Load", "it can't be loaded again")
        assert ended.wait(PATIENCE_S)
    chromium.problems()


def test_a_model_that_cannot_be_loaded_says_why(page: Browser) -> None:
    """A damaged file: the reason stands in the list, and in the answer of who asks it all the same."""
    load(page, BROKEN)
    page.wait(lambda: page.all("#models .error"), "no reason")
    assert "broken.gguf" in page.text("#models .error")
    page.ask("Hello")
    assert "broken.gguf" in page.text(".answer .error")


def test_a_server_with_a_key(chromium: Browser, tmp_path: Path) -> None:
    """Without the key the page says so; with it, kept until the tab closes, all works, PDFs and loading, too."""
    model = tiny_llama(tmp_path / "tiny.gguf", n_layer=1, chat_template=CHAT)
    with started(model, api_key="secret") as running:
        chromium.resize(*SIZES["wide"])
        chromium.open(running.url)
        chromium.wait(lambda: "the API key is missing" in chromium.text("#state"), "the key is not asked for")
        chromium.press("s", alt=True)
        chromium.find("[name=key]").send_keys("secret", "\n".replace("\n", "\ue007"))
        chromium.wait(lambda: chromium.text("#state").endswith("of context"), "the key does not help")
        assert chromium.run("return localStorage['edgedec.settings'].includes('secret')") is False
        chromium.set(max_tokens="9")
        chromium.ask("Hello")
        assert chromium.text(".answer .error") == ""
    chromium.problems()


# Files


def test_texts_go_before_the_message(page: Browser, tmp_path: Path) -> None:
    """A text is read here, shown above the box, sent under its name, and kept with the message."""
    page.record_requests()
    give_file(page, tmp_path, "a.txt", b"one\r\ntwo\n")
    give_file(page, tmp_path, "b.py", b"print(1)")
    assert [node.text for node in page.all("#files li")] == ["a.txt (8 characters) ×", "b.py (8 characters) ×"]
    page.all("#files button")[1].click()
    assert page.focused == "attach"
    page.ask("What is this?")
    assert page.sent[0]["messages"] == [{"role": "user", "content": "File a.txt:\n\none\ntwo\n\nWhat is this?"}]
    assert page.all("#files li") == []
    assert page.text(".message.user .file summary") == "a.txt (8 characters)"
    assert page.text(".message.user .file pre") == "one\ntwo\n"
    give_file(page, tmp_path, "c.txt", b"alone")
    page.find("#prompt").click()
    page.press("\n")
    page.wait(lambda: len(page.sent) == 2, "a file alone is not sent")
    page.wait_idle()
    assert page.sent[1]["messages"][-1]["content"] == "File c.txt:\n\nalone"


def test_of_a_long_file_passages_are_sent(page: Browser, tmp_path: Path) -> None:
    """Those that match the message, which is said; later messages follow them until another file is searched."""
    page.record_requests()
    lines = [f"Line {i} tells of thing {i * 7}." for i in range(200)]
    give_file(page, tmp_path, "book.txt", "\n".join(lines).encode())
    page.ask("What is thing 441?")
    first = page.sent[0]["messages"][0]["content"]
    assert first.startswith("[book.txt, line")
    assert first.endswith("\n\nWhat is thing 441?")
    assert lines[63] in first
    assert "longer than the context of 4096 tokens" in page.text(".message.user .note")
    page.ask("Why?")
    assert [message["content"] for message in page.sent[1]["messages"][::2]] == [first, "Why?"]
    give_file(page, tmp_path, "new.txt", "\n".join(lines).encode())
    page.ask("And thing 700?")
    third = page.sent[2]["messages"]
    assert third[0]["content"] == "What is thing 441?"
    assert lines[100] in third[-1]["content"]


def test_a_message_waits_for_its_files(page: Browser, tmp_path: Path) -> None:
    """While a file is read nothing is sent, and the text stays in its box."""
    page.run(
        "const real = fetch; window.fetch = (path, ...rest) =>"
        " path === '/page/pdf' ? new Promise(() => {}) : real(path, ...rest)"
    )
    (tmp_path / "a.pdf").write_bytes(pdf_of("a"))
    page.find("#file").send_keys(str(tmp_path / "a.pdf"))
    page.find("#prompt").send_keys("Sum up.")
    page.press("\n")
    page.wait(lambda: page.text("#state").startswith("A file is still being read"), "it is not said")
    assert page.all(".message") == []
    assert page.find("#prompt").get_property("value") == "Sum up."


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.bin", b"a\x00b", "a.bin is no text in UTF-8; texts, PDFs and pictures can be attached."),
        ("a.txt", b"caf\xe9", "a.txt is no text in UTF-8"),
        ("a.txt", b" \n", "a.txt is empty."),
        ("a.txt", b"x" * 1_000_001, "a.txt is too long: the files of a message may have 1,000,000 characters."),
        ("a.pdf", b"%PDF-" + b"0" * 8_000_000, "a.pdf has 8.0 MB; a PDF may have 8.0 MB."),
        ("a.pdf", b"no pdf", "a.pdf is refused: the "),
    ],
)
def test_files_that_are_refused(page: Browser, tmp_path: Path, name: str, data: bytes, words: str) -> None:
    """With the file's name and the reason, which goes when another file is taken."""
    give_file(page, tmp_path, name, data)
    assert words in page.text("#file-error")
    assert page.all("#files li") == []
    give_file(page, tmp_path, "b.txt", b"fine")
    assert not page.shown("#file-error")
    assert len(page.all("#files li")) == 1


def test_a_pdf_is_read_by_the_server(page: Browser, tmp_path: Path) -> None:
    """Its text goes before the message, as that of a text."""
    page.record_requests()
    give_file(page, tmp_path, "a paper.pdf", pdf_of("First.", "Second."))
    assert [node.text for node in page.all("#files li")] == ["a paper.pdf (2 pages) ×"]
    page.ask("Sum up.")
    assert page.sent[0]["messages"][0]["content"] == "File a paper.pdf:\n\nFirst.\n\nSecond.\n\nSum up."


# What is kept and exported


def test_a_conversation_is_exported(page: Browser, tmp_path: Path) -> None:
    """As Markdown with thoughts and files, and as JSON with all that is known; the files bear its title."""
    give_file(page, tmp_path, "a.md", b"```\ncode\n```\n")
    page.ask("Write: a function!")
    page.press("x", alt=True)
    assert page.focused == "export-markdown"
    page.press("\n")
    saved = page.downloads / "write-a-function.md"
    page.wait(saved.exists, "nothing saved")
    answer = f"Here **it** is:\n\n```python\n{CODE}```"
    assert saved.read_text(encoding="utf-8") == (
        "# Write: a function!\n\n## You\n\nFile a.md:\n\n````\n```\ncode\n```\n````\n\nWrite: a function!\n\n"
        f"## known\n\n> They want code.\n\n{answer}\n"
    )
    page.find("#export").click()
    page.find("#export-json").click()
    saved = page.downloads / "write-a-function.json"
    page.wait(saved.exists, "nothing saved")
    found = json.loads(saved.read_text(encoding="utf-8"))
    assert (found["format"], found["title"]) == ("edgedec chat 1", "Write: a function!")
    assert found["messages"][0]["files"][0]["name"] == "a.md"
    (given,) = found["messages"][1]["answers"]
    assert (given["content"].strip(), given["reasoning"]) == (answer, "They want code.")
    assert given["meta"]["model"] == "known"


def test_a_full_browser_says_so(page: Browser) -> None:
    """Where the browser keeps no more, the answer is there all the same, and the page says what is lost."""
    page.run("for (let n = 1 << 22; n; n >>= 1) try { localStorage['x' + n] = 'x'.repeat(n) } catch {}")
    page.ask("Write a function.")
    assert "square" in page.text(".code code")
    assert page.text("#state") == "This browser has no room for more conversations."


def test_conversations_of_earlier_versions_open(page: Browser) -> None:
    """One answer a message, as they kept it; damaged ones are left out; the page shows and goes on with the rest."""
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho", "meta": {}}]
    old = {"id": "1", "messages": said}
    page.run("localStorage['edgedec.conversations'] = arguments[0]", json.dumps([old, {"id": "2"}, None]))
    page.driver.refresh()
    page.wait(lambda: page.all(".message.assistant"), "nothing shown")
    assert page.text(".answer .text") == "Ho"
    page.record_requests()
    page.ask("And?")
    assert page.sent[0]["messages"][1] == {"role": "assistant", "content": "Ho"}


# Texts never become markup


RENDERED = {
    "<script>alert(1)</script> **b** `<i>`": "<p>&lt;script&gt;alert(1)&lt;/script&gt; <strong>b</strong>"
    " <code>&lt;i&gt;</code></p>",
    "[x](javascript:alert(1))": "<p>[x](javascript:alert(1))</p>",
    "[x](https://e.org) ![i](https://e.org/i.png)": '<p><a href="https://e.org" rel="noopener noreferrer nofollow" '
    'target="_blank" title="https://e.org">x</a> ![i](https://e.org/i.png)</p>',
    "# T\n- a\n  - b\n- c": "<h3>T</h3><ul><li><p>a</p><ul><li>b</li></ul></li><li>c</li></ul>",
    "|a|b|\n|-|-|\n|1|2|": "<table><thead><tr><th>a</th><th>b</th></tr></thead>"
    "<tbody><tr><td>1</td><td>2</td></tr></tbody></table>",
    "a_b_c \\*d\\* 2*3": "<p>a_b_c *d* 2*3</p>",
    '```"><img src=x onerror=alert(1)>\n<b>': '<div class="code"><div class="code-head"><span>"&gt;&lt;img</span>'
    '<button type="button" class="copy-code" aria-label="Copy the code (&quot;&gt;&lt;img)">Copy</button></div>'
    '<pre tabindex="0"><code>&lt;b&gt;</code></pre></div>',
}


def test_markdown_becomes_nodes_and_never_markup(page: Browser) -> None:
    """HTML stays text, links lead to the web only, images stay text, and the usual Markdown becomes its elements."""
    script = """args[0].map((text) => {
        const node = document.createElement('div');
        node.append(m.render(text));
        return node.innerHTML;
    })"""
    assert page.module("/static/markdown.js", script, list(RENDERED)) == list(RENDERED.values())


COLORED = [
    ("js", "const a = `x ${1}` // c", ["keyword:const", "string:`x ${1}`", "comment:// c"]),
    ("rust", "fn f<'a>(x: &'a str) -> char { 'x' }", ["keyword:fn", "keyword:str", "keyword:char", "string:'x'"]),
    ("SQL", "Select a from t -- c", ["keyword:Select", "keyword:from", "comment:-- c"]),
    (
        "c",
        '/* a\nb */ int x = 0xFF; puts("\\"");',
        ["comment:/* a\nb */", "keyword:int", "number:0xFF", "call:puts", 'string:"\\""'],
    ),
    (
        "html",
        '<p class="a">x</p><!-- c',
        ["keyword:<p", 'string:"a"', "keyword:>", "keyword:</p", "keyword:>", "comment:<!-- c"],
    ),
    ("json", '{"a": [1.5e3, true]}', ['string:"a"', "number:1.5e3", "keyword:true"]),
    ("python", '"""a\n', ['string:"""a\n']),  # not closed yet
    ("nonsense", "def f(): 1", []),
    ("", "def f(): 1", []),
]


def test_code_is_colored_and_unchanged(page: Browser) -> None:
    """Each language's tokens get their class; the text is what it was, whatever it is."""
    script = """args[0].map(([language, text]) => {
        const parts = m.highlight(text, language), node = document.createElement('code');
        node.append(...parts);
        return [[...node.children].map((n) => n.className + ':' + n.textContent), node.textContent === text];
    })"""
    found = page.module("/static/highlight.js", script, [case[:2] for case in COLORED])
    assert found == [[spans, True] for *_, spans in COLORED]


def test_hostile_code_is_colored_in_time(page: Browser) -> None:
    """Quotes, slashes and comments that never close: 90,000 characters of each end, unchanged."""
    texts = [piece * (90_000 // len(piece)) for piece in ('"', "'", "`", "/*", '"""', "\\", "(", "a.", "0x", "<", "1e")]
    script = """args[0].flatMap((text) => ['js', 'python', 'rust', 'html'].map((language) =>
        m.highlight(text, language).map((part) => part.textContent ?? part).join('') === text))"""
    assert set(page.module("/static/highlight.js", script, texts)) == {True}


# Keys, and those who don't see the page


def test_the_page_is_used_by_keyboard_alone(page: Browser) -> None:
    """The focus goes through all that can be used, in the order of the page; each Alt key does what the list says."""
    page.ask("One.")
    page.run("document.querySelector('.skip').focus()")
    seen = [page.focused]
    for _ in range(18):
        page.press("\ue004")
        seen.append(page.focused)
    assert seen == [
        *("skip", "title", "×", "open-settings", "open-keys", "toggle-side", "model"),
        *("export", "new", "log", "Copy", "Edit", "Thoughts"),
        *("copy-code", 'def square(x):\n    # a "comment"\n    return x * 12', "Copy", "regenerate", "Why this speed"),
        "prompt",
    ]
    page.press("m", alt=True)
    assert page.focused == "model"
    page.press("k", alt=True)
    assert page.focused == "message assistant"
    page.press("k", alt=True)
    assert page.focused == "message user"
    page.press("j", alt=True)
    assert page.focused == "message assistant"
    page.press("h", alt=True)
    assert page.find("#keys").is_displayed()
    page.press("n", alt=True)  # nothing while a dialog is open
    page.press("\ue00c")
    assert not page.find("#keys").is_displayed()
    assert len(page.all(".message")) == 2
    page.press("p", alt=True)
    page.press("\ue013")  # arrow up: edit the last message
    page.wait(lambda: page.shown("[aria-label='Edit the message']"), "nothing to edit")
    page.press("\ue00c")
    assert not page.shown("[aria-label='Edit the message']")
    page.press("x", alt=True)
    assert page.focused == "export-markdown"
    page.press("\ue00c")
    assert not page.shown("#export-markdown")
    page.press("n", alt=True)
    assert (page.all(".message"), page.focused) == ([], "prompt")


def test_everything_that_can_be_used_has_a_name(page: Browser, tmp_path: Path) -> None:
    """What a screen reader finds: each button, box and list has a name, and the answer is announced once, whole."""
    give_file(page, tmp_path, "a.txt", b"text")
    page.ask("One.")
    tree = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    used = ("button", "textbox", "combobox", "log", "navigation", "article", "DisclosureTriangle")
    nodes = [node for node in tree if not node["ignored"] and node["role"]["value"] in used]
    assert len(nodes) >= 18
    assert [node for node in nodes if not node.get("name", {}).get("value")] == []
    assert page.find("#announce").get_attribute("aria-live") == "polite"
    assert page.text("#announce") == f"Answer: Here **it** is:\n\n```python\n{CODE}```\n"


# How it looks


@pytest.mark.parametrize("size", SIZES)
def test_the_layout_holds(page: Browser, size: str) -> None:
    """Nothing overlaps or is cut off, at three sizes; colors are told apart (WCAG AA: 4.5 to 1), light and dark."""
    page.resize(*SIZES[size])
    page.driver.refresh()
    page.ask("Write a function, " + "with a long name " * 12 + "W" * 200)
    width, height = SIZES[size]
    header, log, composer = page.box("header"), page.box("#log"), page.box("#composer")
    assert page.run("return document.documentElement.scrollWidth") <= width
    assert header["bottom"] <= log["top"] + 1
    assert log["bottom"] <= composer["top"] + 1
    assert composer["bottom"] <= height + 1
    assert log["height"] > height / 3
    boxes = {css: page.box(css) for css in ("#prompt", "#send", "#attach", "#model", "#export", ".code", ".message")}
    assert [css for css, box in boxes.items() if box["left"] < 0 or box["right"] > width or not box["height"]] == []
    side = page.shown("#side")
    assert side == (size != "phone")
    assert not side or page.box("#side")["right"] <= header["left"] + 1
    assert page.box(".copy-code")["bottom"] <= page.box(".code pre")["top"] + 1
    for scheme in ("light", "dark"):
        page.color_scheme(scheme)
        pairs = page.run(_CONTRASTS)
        page.run("document.querySelector('#new').click()")
        pairs += page.run(_CONTRASTS)
        page.run("document.querySelector('#conversations .title').click()")
        assert len({name for name, _ in pairs}) >= 18
        assert {name: ratio for name, ratio in pairs if ratio < 4.5} == {}
        brightness = mean_brightness(page.screenshot())
        assert brightness > 0.8 if scheme == "light" else brightness < 0.25


def test_on_a_phone_the_conversations_open_over_the_page(page: Browser) -> None:
    """They open and close by buttons, which hand the focus on, and close when one is chosen."""
    page.resize(*SIZES["phone"])
    page.driver.refresh()
    page.ask("One.")
    assert not page.shown("#side")
    page.find("#toggle-side").click()
    assert page.shown("#side")
    page.find("#close-side").click()
    assert (page.shown("#side"), page.focused) == (False, "toggle-side")
    page.find("#toggle-side").click()
    page.find("#conversations .title").click()
    assert not page.shown("#side")


def mean_brightness(png: bytes) -> float:
    """Return the mean of all channels of a picture, 0 to 1."""
    image = pytest.importorskip("matplotlib.image")
    return float(image.imread(io.BytesIO(png), format="png")[..., :3].mean())


# [name, contrast] of texts against what is behind them, by WCAG 2.2; what is hidden has no place, and is left out.
_CONTRASTS = """
const channel = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const parse = (text) => text.match(/[0-9.]+/g).map(Number);
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const behind = (node) => {
  for (; node; node = node.parentElement) {
    const color = parse(getComputedStyle(node).backgroundColor);
    if (color.length < 4 || color[3] > 0) return color;
  }
  return [255, 255, 255];
};
const names = ["#state", "#send", "#attach", ".who", ".message.user .text", ".answer .text", ".note", ".why p",
  ".code-head", ".copy-code", "code .keyword", "code .call", "code .comment", "code .number", "summary", "#model",
  "#start .hint", "#tries strong", "#tries span", "#models .facts", "#models button", "#models [aria-disabled=true]"];
return names.filter((name) => document.querySelector(name)?.getClientRects().length).map((name) => {
  const node = document.querySelector(name);
  const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))];
  return [name, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
});
"""
