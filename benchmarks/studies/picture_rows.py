"""What `picture-rows` takes on a random model, and its KL to all rows, in nats, of 8 pictures; --json-out FILE."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.models.picture_models import picture_file, picture_model
from support.models.siglip_files import siglip_projector

import edgedec
from edgedec_apps.bench.provenance import report

figures, laws = dict[str, tuple[float, ...]](), list[np.ndarray]()
with TemporaryDirectory() as folder:
    model = picture_model(Path(folder))
    siglip_projector(model.with_name("mmproj-tiny-f16.gguf"), "idefics3", image_size=256, merge=2, n_layer=6)
    for share, by in ((1.0, "flow"), (0.66, "flow"), (0.66, "attention"), (0.33, "flow"), (0.33, "attention")):
        lossy = edgedec.Lossy(methods={"picture_rows": {"share": share, "by": by}})
        with edgedec.load(model, runtime="cpu", n_threads=1, lossy=lossy, draft="off", n_ctx=2048) as engine:
            times, law, do, slot = [], np.empty((8, engine.card.n_vocab)), engine.requests, engine.pool.slots[0]
            for i in range(8):
                message = {"role": "user", "content": "ab " * 20, "images": [picture_file(256, 256, i)]}
                text, pictures = do.mark_pictures([message])
                ids, begin = do.rendered_ids(do.render(text), pictures), perf_counter()
                rows, encode_s = do.picture_rows(pictures), perf_counter() - begin
                stats = engine.generate(ids, pictures=rows, max_tokens=1, temperature=0.0).stats
                times.append((1000 * encode_s, 1000 * stats.first_token_s))
                law[i] = slot.session.forward(np.array(ids[-1:], np.int32), n_past=len(ids) - 1).logits[-1]
        laws.append(law - np.log(np.exp(law).sum(axis=1, keepdims=True)))
        values = [*np.median(times, axis=0), (np.exp(laws[0]) * (laws[0] - laws[-1])).sum(axis=1).mean()]
        figures[f"{share} by {by}"] = (pictures[0].n_rows, *(round(float(value), 3) for value in values))
report({"rows, ms to encode, ms to read, KL": figures}, Path(sys.argv[2]) if sys.argv[1:2] == ["--json-out"] else None)
