"""edgedec learn: let drafts come from the user's own files."""

import os
import sys
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Annotated, Any

from edgedec.errors import RequestError, StorageError, counted
from edgedec.memory_plan import format_bytes, parse_size
from edgedec.progress import CancelToken
from edgedec.storage.cache_files import cache_folder
from edgedec_apps.cli import completion
from edgedec_apps.cli.declared import argument, flag, model_flag
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.options import AsJson, Offline, Quiet
from edgedec_apps.cli.shown.progress import ProgressLine
from edgedec_apps.cli.shown.terminal import one_line, say, write_json, write_line

if TYPE_CHECKING:
    from edgedec_apps.learning import LearnReport


def command(
    paths: Annotated[list[Path] | None, argument("PATH", "Files, and folders of files.")] = None,
    *,
    for_model: str | None = model_flag(
        "--for MODEL",
        "The model that will write; models of the same vocabulary share what was learned.",
        complete=completion.any_model,
    ),
    head: str | None = model_flag(
        "--head MODEL",
        "Let MODEL's draft head go on learning from the answers that serve --keep-answers kept.",
        complete=completion.any_model,
    ),
    back: bool = flag("--back", "With --head: go back to the head before all learning.", False, panel="Learning"),
    most: str = flag("--most SIZE", "Most bytes for a vocabulary, 8 a token.", "16MB", panel="Learning"),
    listing: bool = flag("--list", "List what was learned.", False, panel="Learning"),
    forget: bool = flag("--forget", "Forget the files at PATH, --head's answers, or all.", False, panel="Learning"),
    offline: Offline = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Learn your own files, from which drafts come: code and documents that a model's texts will resemble.

    Drafts change the speed of a text, never the text. The files' tokens are kept in the cache, in a file that only you
    may read, and nowhere else. --draft auto uses them from the next load on; --draft learned uses nothing else.

    With --head a trained draft head learns, at low priority: a part of the answers is held back, and the new head is
    taken where it drafts them at least as well as the old one. Needs torch; the same command goes on after Ctrl-C.
    """
    if head is not None:
        if paths or listing or for_model is not None or (back and forget):
            raise RequestError("--head takes --back or --forget, and no files, --for or --list")
        _tell(*_learn_head(head, back=back, forget=forget, quiet=quiet), as_json=as_json, quiet=quiet)
        return
    if back:
        raise RequestError("--back needs --head MODEL")
    if listing + forget + (for_model is not None) != 1:
        raise RequestError("give one of --for MODEL (with files or folders), --list and --forget")
    if listing and paths:
        raise RequestError("--list shows all that was learned; leave the files and folders out")
    if listing:
        _list(as_json=as_json)
    elif forget:
        _forget(paths or None, as_json=as_json, quiet=quiet)
    elif not paths:
        raise RequestError(f"give the files or folders that are to be learned for {for_model}")
    else:
        assert for_model is not None, "it is one of the three"
        report = _learn(for_model, paths, parse_size(most), offline=offline, quiet=quiet)
        _write_report(for_model, report, as_json=as_json, quiet=quiet)


def _learn(model: str, paths: list[Path], most_bytes: int, *, offline: bool, quiet: bool) -> "LearnReport":
    def work(cancel: CancelToken) -> "LearnReport":
        import edgedec
        from edgedec_apps.learning import files_of, learn_files

        files_of(paths)  # a wrong path is refused before the model is loaded
        with ProgressLine(quiet=quiet) as on_progress:
            root = cache_folder()
            with edgedec.load(
                model, draft="off", n_ctx=64, offline=offline, on_progress=on_progress, cancel=cancel
            ) as engine:
                return learn_files(
                    root, model, engine.tokenizer, paths, most_bytes=most_bytes, on_progress=on_progress, cancel=cancel
                )

    return interruptible(work)


def _learn_head(name: str, *, back: bool, forget: bool, quiet: bool) -> tuple[dict[str, Any], str]:
    """Do what --head asks for; return the report, for programs and for a person."""
    from edgedec.load_options import ResolveOptions
    from edgedec.loading.resolve import resolve
    from edgedec_apps.kept_answers import answers_file, forget_answers, snapshot
    from edgedec_export.training.train_drafter import LearnedHead, TrainOptions, learn_head
    from edgedec_models.model_heads import go_back, take_head

    model = resolve(name, ResolveOptions(cache_folder(), offline=True))
    if back:
        go_back(model)
        return {"back": True}, f"the head of {name} is the one before all learning"
    path = answers_file(cache_folder(), model)
    if forget:
        n_files = forget_answers(cache_folder(), path)
        return {"forgotten": n_files}, f"{counted(n_files, 'file')} of answers forgotten"

    def work(cancel: CancelToken) -> LearnedHead:
        if sys.platform != "win32":
            os.nice(19)  # on Linux of this thread, and of those that it starts
        with ProgressLine(quiet=quiet) as on_progress:
            texts, folder = snapshot(path)
            learned = learn_head(model, texts, folder, TrainOptions(on_progress=on_progress, cancel=cancel))
            if learned.after >= learned.before:
                take_head(learned.path, model)
            rmtree(folder, ignore_errors=True)
            return learned

    _, before, after, n = interruptible(work)
    end = f"it is taken; edgedec learn --head {name} --back goes back" if after >= before else "it is not taken"
    sentence = f"{after:.2f} tokens a step with the new head, {before:.2f} with the old one, on {n:,} held-back tokens"
    return {"before": before, "after": after, "tokens": n, "taken": after >= before}, f"{sentence}: {end}"


def _write_report(model: str, report: "LearnReport", *, as_json: bool, quiet: bool) -> None:
    learned = report.learned
    if as_json:
        counts = {"files": report.n_files, "tokens": report.n_tokens, "unread": report.n_unread}
        rest = {"without_room": report.n_without_room, "dropped": report.n_dropped, "bytes": learned.n_bytes}
        write_json({"model": model, "path": os.fspath(learned.file)} | counts | rest)
    elif not quiet:
        say(
            f"learned {counted(report.n_files, 'file')}, {report.n_tokens:,} tokens, for {model}; in all "
            f"{counted(len(learned.sources), 'file')}, {format_bytes(learned.n_bytes)}"
        )
        for n, why in (
            (report.n_unread, "left out: no text in UTF-8 of at most 1 MiB"),
            (report.n_without_room, "left out: no room (--most)"),
            (report.n_dropped, "learned before and forgotten to make room (--most)"),
        ):
            if n:
                say(f"{counted(n, 'file')} {why}")


def _list(*, as_json: bool) -> None:
    from edgedec_apps.learning import all_learned

    files = list(all_learned(cache_folder()))
    if as_json:
        write_json(
            {
                "learned": [
                    {
                        "path": os.fspath(each.file),
                        "models": list(each.models),
                        "bytes": each.n_bytes,
                        "files": [{"path": source.path, "tokens": len(source.tokens)} for source in each.sources],
                    }
                    for each in files
                    if not isinstance(each, StorageError)
                ],
                "unreadable": [str(each) for each in files if isinstance(each, StorageError)],
            }
        )
        return
    if not files:
        write_line("nothing was learned")
    for each in files:
        if isinstance(each, StorageError):
            write_line(one_line(str(each)))
            continue
        models = ", ".join(map(one_line, each.models))
        write_line(f"{format_bytes(each.n_bytes):>9}  for {models}: {counted(len(each.sources), 'file')}")
        for source in each.sources:
            write_line(f"{len(source.tokens):>9,}  {one_line(source.path)}")


def _forget(paths: list[Path] | None, *, as_json: bool, quiet: bool) -> None:
    from edgedec_apps.kept_answers import forget_answers
    from edgedec_apps.learning import forget_files

    n_forgotten = forget_files(cache_folder(), paths) + (0 if paths else forget_answers(cache_folder()))
    _tell({"forgotten": n_forgotten}, f"{counted(n_forgotten, 'file')} forgotten", as_json=as_json, quiet=quiet)


def _tell(document: dict[str, Any], sentence: str, *, as_json: bool, quiet: bool) -> None:
    if as_json:
        write_json(document)
    elif not quiet:
        say(sentence)
