"""Which media item belongs to which document: counted by placeholders, refused by name."""

from __future__ import annotations

import pytest
import torch

from hf_packfree.errors import BoundaryError
from hf_packfree.packing.media import Media, media_offsets

IMAGE, VIDEO, TEXT, EDGE = 90, 91, 5, 7
ONE = [TEXT, EDGE, *[IMAGE] * 4, EDGE, EDGE, *[IMAGE] * 6, EDGE]
TWO = [TEXT, TEXT]
THREE = [IMAGE, IMAGE]
FILM = [TEXT, *[VIDEO] * 2, TEXT, *[VIDEO] * 2, TEXT]


def images(*sizes: int) -> Media:
    return Media(
        name="image",
        token=IMAGE,
        sizes=torch.tensor(sizes).long(),
        runs=torch.ones(len(sizes)).long(),
    )


def row(*documents: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = torch.tensor([0, *[len(document) for document in documents]]).cumsum(0)
    return torch.tensor(sum(documents, [])), offsets.int()


def test_items_follow_their_placeholders():
    assert media_offsets(*row(ONE, TWO, THREE, THREE), images(4, 6, 2, 2)).tolist() == [
        0,
        2,
        2,
        3,
        4,
    ]


def test_without_items_every_document_has_none():
    assert media_offsets(*row(TWO, TWO), images()).tolist() == [0, 0, 0]


def test_frames_of_a_video_stand_apart():
    videos = Media(name="video", token=VIDEO, sizes=torch.tensor([4, 4]), runs=torch.tensor([2, 2]))
    assert media_offsets(*row(FILM, TWO, FILM), videos).tolist() == [0, 1, 1, 2]


def test_tokens_of_another_kind_may_stand_between():
    videos = Media(name="video", token=VIDEO, sizes=torch.tensor([4]))
    assert media_offsets(*row([VIDEO, TEXT, VIDEO, VIDEO, TEXT, VIDEO]), videos).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        (
            (6, 4, 2),
            "a run of image placeholders in document 0 that ends at token 5, inside image 0 of 6 "
            "tokens",
        ),
        (
            (4, 6),
            r"2 image placeholders in document 2 \(tokens 19 to 20\), where image 2 is the first",
        ),
        ((4, 6, 2, 2), "4 images and placeholders of 3: image 3 belongs to no document"),
        ((4, 6, 3), r"2 image placeholders in document 2 .* which have \[3\] from there on"),
    ],
)
def test_counts_that_differ_name_document_and_item(sizes, found):
    with pytest.raises(BoundaryError, match=found):
        media_offsets(*row(ONE, TWO + TWO, THREE), images(*sizes))


@pytest.mark.parametrize("cut", [3, 9])
def test_a_boundary_inside_an_item_is_refused(cut):
    with pytest.raises(
        BoundaryError, match=rf"boundary at token {cut}, inside image {int(cut > 6)}"
    ):
        media_offsets(*row(ONE[:cut], ONE[cut:]), images(4, 6))


def test_a_boundary_between_two_frames_is_refused():
    videos = Media(name="video", token=VIDEO, sizes=torch.tensor([4]), runs=torch.tensor([2]))
    with pytest.raises(BoundaryError, match="2 video placeholders in document 0"):
        media_offsets(*row(FILM[:4], FILM[4:]), videos)
