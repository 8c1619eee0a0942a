"""Draw docs/influence.png: whose tokens change whose predictions in a packed row, before and after.

python -m tests.benchmarks.influence
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

from hf_packfree.demo.harm import influence
from hf_packfree.demo.plot import LOOK, draw_map
from hf_packfree.demo.train import build_model, choose_documents, passages, train_tokenizer
from hf_packfree.patching import apply_patches

PLOT = Path(__file__).resolve().parents[2] / "docs/influence.png"
COUNT = 10


def main(path: Path = PLOT) -> None:
    """Measure the demo's model before any training, and draw."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    texts = passages()
    tokenizer = train_tokenizer(texts)
    documents = choose_documents(tokenizer, texts, 2 * COUNT, 0)
    plain = build_model(tokenizer, 0).eval()
    patched = apply_patches(deepcopy(plain))
    found = [influence(model, documents[:COUNT], documents[COUNT:]) for model in (plain, patched)]
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(10, 4.2), dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        before, after = figure.subplots(1, 2)
        draw_map(before, found[0], "transformers: documents read each other")
        image = draw_map(after, found[1], "hf_packfree: each document reads itself")
        figure.colorbar(image, ax=[before, after], label="relative change of logits")
        figure.suptitle(f"{COUNT} documents packed into one row", fontsize=11)
        figure.savefig(path)


if __name__ == "__main__":
    main()
