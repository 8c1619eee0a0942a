"""Lengths of a benchmark's documents: a distribution's, or those of the user's file, never
altered in silence.
"""

from __future__ import annotations

import json

import pytest

import hf_packfree.bench
from hf_packfree.bench import BenchOptions, Candidate, choose_lengths, run_bench
from hf_packfree.cli import main
from hf_packfree.errors import UnsupportedInput
from tests.support import tiny
from tests.test_bench import report_of


def fill(lengths):
    return sum(lengths) / len(lengths) / max(lengths)


@pytest.fixture
def lengths_file(tmp_path):
    """A function that writes lines into a file and returns its path."""

    def write(*lines):
        file = tmp_path / "lengths.jsonl"
        file.write_text("".join(f"{line}\n" for line in lines))
        return str(file)

    return write


def test_named_lengths_fill_a_batch_as_they_say():
    assert fill(choose_lengths("instructions", 8, 4096).lengths) == pytest.approx(0.335, abs=0.005)
    assert fill(choose_lengths("uniform", 8, 4096).lengths) == pytest.approx(0.5625)
    assert choose_lengths("equal", 3, 7).lengths == (7, 7, 7)
    assert max(choose_lengths("instructions", 5, 100).lengths) == 100
    assert min(choose_lengths("instructions", 50, 4).lengths) == 1


def test_a_distribution_has_512_tokens_unless_told():
    sample = choose_lengths("equal", 2)
    assert sample.lengths == (512, 512) and sample.cut == 0
    assert sample.origin == "the distribution 'equal', with 512 tokens in the longest document"


def test_a_folder_of_a_distributions_name_does_not_hide_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "equal").mkdir()
    assert choose_lengths("equal", 2, 7).lengths == (7, 7)


def test_a_line_of_a_file_ends_at_a_newline_alone(tmp_path):
    """Text inside JSON may hold what else Unicode ends lines with."""
    file = tmp_path / "lengths.jsonl"
    text = "a\u2028b\u2029c\x85d"
    lines = [json.dumps({"length": n, "text": text}, ensure_ascii=False) for n in (3, 9)]
    file.write_text("\r\n".join(lines), encoding="utf-8", newline="")
    assert choose_lengths(str(file), 2).lengths == (3, 9)


def test_a_file_of_lengths_is_read_as_its_quantiles(lengths_file):
    lines = [*range(1, 99), '{"length": 99, "text": "x"}', json.dumps({"input_ids": [0] * 100}), ""]
    sample = choose_lengths(lengths_file(*lines), 4)
    assert sample.lengths == (13, 38, 63, 88)
    assert (
        "4 evenly spaced quantiles" in sample.origin
        and "(documents: 100; tokens: 1 to 100)" in sample.origin
    )
    assert "more than once" not in sample.origin


def test_lengths_of_a_file_stay_as_they_are(lengths_file):
    sample = choose_lengths(lengths_file(4000, 6000, 100), 8)
    assert sample.lengths == (100, 100, 100, 4000, 4000, 6000, 6000, 6000) and sample.cut == 0
    assert (
        "some more than once, because it has fewer documents" in sample.origin
        and sample.origin.endswith("; none is cut")
    )


@pytest.mark.parametrize(
    ("longest", "lengths", "cut"),
    [(512, (100, 512, 512), 2), (4000, (100, 4000, 4000), 1), (6000, (100, 4000, 6000), 0)],
)
def test_longest_cuts_documents_of_a_file_and_says_how_many(lengths_file, longest, lengths, cut):
    sample = choose_lengths(lengths_file(4000, 6000, 100), 3, longest)
    assert sample.lengths == lengths and sample.cut == cut
    assert sample.origin.endswith(f"; longer than {longest:,} tokens and cut to that: {cut} of 3")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5\nsix", "line 2"),
        ("0", "line 1"),
        ('{"words": 3}', "line 1"),
        ("7\n[1]", "line 2"),
        ("", "without a line"),
        ('{"input_ids": "hello"}', "line 1"),
        ("[" * 100_000, "line 1"),
    ],
)
def test_a_file_without_lengths_is_refused(tmp_path, lengths_file, text, said):
    with pytest.raises(UnsupportedInput, match=said):
        choose_lengths(lengths_file(text), 2)
    with pytest.raises(UnsupportedInput, match="no file and no distribution"):
        choose_lengths(str(tmp_path / "nothing"), 2)


def test_a_file_is_utf_8_with_a_mark_or_without(tmp_path):
    file = tmp_path / "lengths.jsonl"
    file.write_bytes(b"\xef\xbb\xbf5\n6\n")
    assert choose_lengths(str(file), 2).lengths == (5, 6)
    file.write_bytes(b"5\n\xff\n")
    with pytest.raises(UnsupportedInput, match="no text in UTF-8"):
        choose_lengths(str(file), 2)


@pytest.fixture
def benched(monkeypatch):
    """What the command hands to `run_bench`, which measures nothing here."""
    found = []

    def bench(options, progress):
        found.append(options)
        rows = (
            Candidate(name, 40, (1.0,), 10.0)
            for name in ("unpatched padded", "unpatched packed", "patched padded")
        )
        return report_of(*rows, options=options)

    monkeypatch.setattr(hf_packfree.bench, "run_bench", bench)
    return found


def test_the_command_leaves_a_files_lengths_alone(capsys, benched, lengths_file):
    assert main(("bench", "--lengths", lengths_file(4000, 6000, 100))) == 0
    assert benched[0].lengths == (100, 100, 100, 4000, 4000, 6000, 6000, 6000)
    out = capsys.readouterr().out
    assert (
        "8 documents of 100 to 6,000 tokens" in out
        and "some more than once" in out
        and "; none is cut." in out
    )


def test_the_command_says_what_it_cut(capsys, benched, lengths_file):
    argv = ("bench", "--lengths", lengths_file(4000, 6000, 100), "--longest", "512")
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "longer than 512 tokens and cut to that: 5 of 8." in out
    assert "8 documents (5 cut to 512 tokens), " in out.strip().splitlines()[-1]
    assert main((*argv, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["options"]["lengths"] == [100] * 3 + [512] * 5 and found["options"]["cut"] == 5
    assert (
        found["options"]["origin"].endswith("cut to that: 5 of 8")
        and "(5 cut to 512 tokens)" in found["sentence"]
    )


def test_the_command_keeps_512_tokens_for_distributions(capsys, benched):
    assert main(("bench",)) == main(("bench", "--longest", "64")) == 0
    assert [max(options.lengths) for options in benched] == [512, 64] and [
        options.cut for options in benched
    ] == [0, 0]
    assert (
        "the distribution 'instructions', with 64 tokens in the longest document."
        in capsys.readouterr().out
    )


def test_lengths_given_in_python_need_no_origin(capsys):
    from hf_packfree.cli import show

    report = report_of(
        Candidate("unpatched padded", 40, (1.0,), 10.0),
        Candidate("patched padded", 40, (1.0,), 10.0),
    )
    show.bench(report)
    assert (
        report.options == BenchOptions("small", (10, 30))
        and "Lengths:" not in capsys.readouterr().out
    )


def test_a_file_too_long_for_any_machine_is_refused_with_what_to_do(capsys, benched, lengths_file):
    file = lengths_file(5, 40_000_000)
    assert main(("bench", "--lengths", file, "--documents", "2")) == 2 and not benched
    assert "give fewer --documents or a smaller --longest" in " ".join(
        capsys.readouterr().err.split()
    )
    assert main(
        ("bench", "--lengths", file, "--documents", "2", "--longest", "9")
    ) == 0 and benched[0].lengths == (5, 9)


@pytest.mark.slow
def test_documents_beyond_a_models_positions_run(tmp_path):
    """So no length is cut for a model's sake either."""
    config = tiny().config
    config.max_position_embeddings = 16
    config.save_pretrained(tmp_path)
    report = run_bench(BenchOptions(str(tmp_path), (40, 30), rounds=1, threads=1))
    assert [row.refused for row in report.candidates] == [None] * 4
