"""Lazy logits are read by whoever takes a pointer, a copy or a gradient as ordinary ones are."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from hf_packfree import PackedSequence
from hf_packfree.errors import UnsupportedInput
from hf_packfree.packing import lazy_repad, repad
from hf_packfree.packing.lazy import LazyTensor

VALUES = torch.arange(1.0, 9.0).view(1, 4, 2)


def record() -> PackedSequence:
    return PackedSequence.from_lengths(
        [1, 3], batch_shape=(2, 3), indices=torch.tensor([2, 3, 4, 5])
    )


def saved(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def from_address(tensor):
    floats = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    return torch.tensor(list(floats)).view(tensor.shape)


def assigned(tensor):
    tensor.data = torch.ones(2, 3, 2)
    return tensor + 0


def sent(tensor):
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    queue.put(tensor)
    return queue.get()


READERS = {
    "data_ptr": from_address,
    "from_dlpack": torch.from_dlpack,
    "numpy's from_dlpack": np.from_dlpack,
    "untyped_storage": lambda tensor: torch.frombuffer(
        bytearray(tensor.untyped_storage()), dtype=torch.float32
    ),
    "storage": lambda tensor: tensor.storage().tolist(),
    "numpy": lambda tensor: tensor.numpy(),
    "asarray": np.asarray,
    "array of another dtype": lambda tensor: tensor.__array__(np.dtype("float64")),
    "tolist": lambda tensor: tensor.tolist(),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda tensor: pickle.loads(pickle.dumps(tensor)),
    "save": saved,
    "share_memory_": lambda tensor: tensor.share_memory_(),
    "multiprocessing": sent,
    "default_collate": lambda tensor: torch.utils.data.default_collate([tensor, tensor]),
    "data": lambda tensor: tensor.data + 1,
    "data assigned": assigned,
    "repr": lambda tensor: [float(number) for number in re.findall(r"[\d.]+", repr(tensor))],
}
"""Each takes a tensor without a history and returns what it found there."""


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("reader", READERS)
def test_whatever_reads_finds_what_is_in_the_padded_tensor(reader):
    read, lazy = READERS[reader], lazy_repad(VALUES, record()).detach()
    assert isinstance(lazy, LazyTensor) and lazy.source.values is None
    wanted, found = read(repad(VALUES, record())), read(lazy)
    assert type(found) is type(wanted)
    assert np.array_equal(np.asarray(found), np.asarray(wanted)) and np.asarray(found).any()


POINTERS = """
import torch
from torch.utils import dlpack
from hf_packfree import PackedSequence
from hf_packfree.packing import lazy_repad

packed = PackedSequence.from_lengths([1, 3], batch_shape=(2, 3), indices=torch.tensor([2, 3, 4, 5]))
lazy = lazy_repad(torch.ones(1, 4, 2), packed).detach()
assert torch.from_dlpack(lazy).sum() == 8
for takes_the_pointer in (dlpack.to_dlpack, torch.Tensor.data_ptr):
    try:
        takes_the_pointer(lazy)
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.slow
def test_what_takes_the_pointer_past_the_methods_raises():
    """In a process of its own, which a null pointer kills."""
    done = subprocess.run([sys.executable, "-c", POINTERS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Cannot access data pointer") == 2


def test_memory_is_shared_by_all_who_read():
    lazy = lazy_repad(VALUES, record()).detach()
    torch.from_dlpack(lazy)[0, 2] = 7.0
    lazy.numpy()[1, 0] = 5.0
    assert lazy[0, 2].tolist() == [7.0, 7.0] and lazy.tolist()[1][0] == [5.0, 5.0]


def test_a_history_is_kept_from_copies_as_it_is_of_ordinary_tensors():
    row = VALUES.clone().requires_grad_()
    for tensor in (lazy_repad(row, record()), repad(row, record())):
        with pytest.raises(RuntimeError, match="graph leaves"):
            copy.deepcopy(tensor)
        with pytest.raises((RuntimeError, BufferError), match="require(s)? grad"):
            torch.from_dlpack(tensor)
        assert saved(tensor).requires_grad and saved(tensor).is_leaf


INFERRED = {
    "detach": lambda tensor: tensor.detach(),
    "slice": lambda tensor: tensor[..., :-1, :],
    "argmax": lambda tensor: tensor.argmax(-1),
    "product": lambda tensor: tensor @ torch.ones(2, 3, requires_grad=True),
}


@pytest.mark.parametrize("read_before", [True, False])
@pytest.mark.parametrize("reader", INFERRED)
def test_they_are_read_in_inference_mode_and_learn_afterwards(reader, read_before):
    row = VALUES.clone().requires_grad_()
    lazy, ordinary = lazy_repad(row, record()), repad(row, record())
    if read_before:
        assert torch.equal(lazy.detach() + 0, ordinary)
    with torch.inference_mode():
        found, wanted = INFERRED[reader](lazy), INFERRED[reader](ordinary)
        assert torch.equal(found, wanted) and found.requires_grad == wanted.requires_grad
    (lazy * lazy).sum().backward()
    assert torch.equal(row.grad, 2 * VALUES)
    assert torch.equal(lazy.detach().mul_(2) + 0, 2 * ordinary)


def test_data_of_another_shape_is_refused():
    with pytest.raises(RuntimeError, match="shape"):
        lazy_repad(VALUES, record()).data = torch.ones(5)


def test_hooks_see_what_was_computed_from_the_padded_tensor():
    """The model's loss is computed from the row."""
    row, seen = VALUES.clone().requires_grad_(), []
    lazy = lazy_repad(row, record())
    lazy.register_hook(lambda grad: (seen.append(grad + 0), 2 * grad)[1])
    lazy.retain_grad()
    (row.pow(2).sum() + lazy.sum()).backward()
    assert (seen[0] == 1).all() and (lazy.grad == 2).all()
    assert torch.equal(row.grad, 2 * VALUES + 2)


def test_logits_changed_in_place_keep_their_own_gradient():
    row = VALUES.clone().requires_grad_()
    lazy = lazy_repad(row, record())
    lazy *= 3
    lazy.retain_grad()
    (row.sum() + 5 * lazy.sum()).backward()
    assert (lazy.grad == 5).all() and (row.grad == 16).all()


def test_without_retain_grad_there_is_none():
    lazy = lazy_repad(VALUES.clone().requires_grad_() * 1.0, record())
    lazy.sum().backward()
    with pytest.warns(UserWarning, match="not a leaf"):
        assert lazy.grad is None


def test_a_leaf_made_of_lazy_logits_gets_and_loses_its_gradient():
    leaf = lazy_repad(VALUES, record()).detach().requires_grad_()
    for _ in range(2):
        leaf.square().sum().backward()
        assert torch.equal(leaf.grad, 2 * repad(VALUES, record()))
        leaf.grad = None
    assert leaf.grad is None


RESHAPING = {
    "squeeze_": lambda tensor: tensor.squeeze_(),
    "unsqueeze_": lambda tensor: tensor.unsqueeze_(0),
    "transpose_": lambda tensor: tensor.transpose_(0, 1),
    "resize_": lambda tensor: tensor.resize_(4),
    "set_": lambda tensor: tensor.set_(torch.ones(3)),
    "as_strided_": lambda tensor: tensor.as_strided_((2, 2), (1, 1)),
}


@pytest.mark.parametrize("way", RESHAPING)
def test_another_shape_in_place_is_refused_and_changes_nothing(way):
    lazy = lazy_repad(VALUES, record()).detach()
    with pytest.raises(UnsupportedInput, match=f"found .*{way}.* logits"):
        RESHAPING[way](lazy)
    assert torch.equal(lazy + 0, repad(VALUES, record()))
