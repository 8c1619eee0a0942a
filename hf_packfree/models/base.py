"""What all replacements of upstream's classes share, and the checkpoint contract that they depend
on.

The contract: parameters and sizes that are the same in every release of a family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from inspect import isclass, signature
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor, nn

from hf_packfree.models.state import PatchState

_Class = TypeVar("_Class", bound="type[Replacement]")


class _Absent:
    """An attribute that upstream's class has and ours must not: `hasattr` is False of class and
    instance.
    """

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError("not of a patched class")


class Replacement(nn.Module):
    """Base of the mixins that patched classes put in front of upstream's.

    transformers decides by a class's name and module which weight conversions, output recorders and
    attention settings apply; FSDP and accelerate decide by its name which layers to wrap. A
    replacement therefore has upstream's name and module, and keeps its own module's name for
    pickling.
    """

    packfree: ClassVar[PatchState | None] = None
    packfree_home: ClassVar[str] = ""
    upstream: ClassVar[Any] = None
    """The modeling module of the class that it is put in front of."""
    endings: ClassVar[tuple[str, ...]] = ()
    """How the names of the classes end that it is put in front of, see `classes_of`."""
    inputs: ClassVar[tuple[str, ...]] = ()
    """The names of the linear layers that the packed branch multiplies the module's input with,
    all at once.
    """
    follows_trees: ClassVar[bool] = False
    """Whether a mixer reads the path of each segment in a tree of shared prefixes."""
    positional_names: ClassVar[tuple[str, ...]] = ()
    """The names of upstream's positional parameters; releases differ in them."""
    attends_for: ClassVar[tuple[str, ...]] = ("sdpa",)
    """The attention implementations in whose place an attention layer runs our operation."""
    kernel_layer_name = _Absent()
    """`kernelize` replaces the forward of every instance whose class has this, anew on each
    train() and eval().
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let a class in front of upstream's show upstream's signature: trainers and tools
        choose by it what they pass.
        """
        owner: Any = next(base for base in cls.__mro__ if "forward" in vars(base))
        upstream: Any = upstream_of(cls)
        if upstream is not nn.Module:
            found = list(signature(upstream.forward).parameters.values())[1:]
            cls.positional_names = tuple(
                each.name for each in found if each.kind is each.POSITIONAL_OR_KEYWORD
            )
            if issubclass(owner, Replacement) and upstream_of(owner) is nn.Module:
                cls.forward = _showing(vars(owner)["forward"], upstream.forward)
        # upstream's layers wrap what the class has by now
        super().__init_subclass__(**kwargs)

    def by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Return the arguments of a forward by upstream's names; None where upstream refuses
        their number or a name twice.
        """
        named = dict(zip(self.positional_names, args)) | kwargs
        return named if len(named) == len(args) + len(kwargs) else None

    @staticmethod
    def op_sizes(layer: Any) -> dict[str, int]:
        """Return the sizes of a layer, ours or upstream's, that backends check; see
        `Target.sizes`.
        """
        return {}

    def calls(self, name: str, part: nn.Module, x: Tensor) -> bool:
        """Whether the packed branch calls its child `name` for inputs like x, instead of reading
        the weights of it.

        How a called module rounds is not known.
        """
        return True

    # the attributes are upstream's
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the module that the class is really in."""
        return _blank, (self.packfree_home, type(self).__qualname__), self.__dict__


def upstream_of(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a replacement is put in front of: `nn.Module` where it is not in
    front of anything yet.
    """
    # FSDP puts a class that is no module in front
    return next(
        base
        for base in cls.__mro__
        if issubclass(base, nn.Module) and not issubclass(base, Replacement)
    )


def _showing(forward: FunctionType, upstream: Any) -> FunctionType:
    """Return a copy of `forward`, without a frame more per call, that has upstream's signature
    and annotations.
    """
    parts = (
        forward.__code__,
        forward.__globals__,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copy: Any = FunctionType(*parts)
    copy.__kwdefaults__, copy.__doc__, copy.__qualname__ = (
        forward.__kwdefaults__,
        forward.__doc__,
        forward.__qualname__,
    )
    copy.__module__, copy.__annotations__ = forward.__module__, upstream.__annotations__
    copy.__signature__ = signature(upstream)
    shown: FunctionType = copy
    return shown


def stands_for(upstream: Any) -> Callable[[_Class], _Class]:
    """Return a decorator that gives a replacement the modeling module `upstream` as its
    `__module__`.
    """

    def rename(cls: _Class) -> _Class:
        cls.packfree_home, cls.__module__ = cls.__module__, upstream.__name__
        cls.upstream = upstream
        return cls

    return rename


_Half = type[Replacement]


def classes_of(upstream: Any, home: str, *halves: _Half) -> dict[str, _Half]:
    """Return {name: our class} of the classes of the modeling module `upstream` whose names end as
    one of the halves says; the longest ending decides, and of several halves that have it the last.
    """
    own = (
        name
        for name, cls in vars(upstream).items()
        if isclass(cls) and cls.__module__ == upstream.__name__
    )
    named = {name: half_for(name, halves) for name in own if not name.endswith("PreTrainedModel")}
    return put_in_front(upstream, home, {name: half for name, half in named.items() if half})


def half_for(name: str, halves: Iterable[_Half]) -> _Half | None:
    """Return what of `halves` is put in front of a class of that name, see `classes_of`; None:
    nothing.
    """
    by_ending = {ending: half for half in halves for ending in half.endings}
    fitting = (ending for ending in by_ending if name.endswith(ending))
    return by_ending.get(max(fitting, key=len, default=""))


def put_in_front(upstream: Any, home: str, halves: Mapping[str, _Half]) -> dict[str, _Half]:
    """Return {name: our class} of classes of the modeling module `upstream`, each with what is put
    in front of it.

    Args:
        home: of ours, where pickling finds them: see `replacements`.
        halves: {name: what is put in front}.
    """
    made: dict[str, _Half] = {}
    for name, half in halves.items():
        fields = {"__module__": home, "__doc__": half.__doc__}
        made[name] = stands_for(upstream)(type(name, (half, getattr(upstream, name)), fields))
    return made


def replacements(home: str) -> Mapping[str, Any]:
    """Return the names of a module of ours, its classes among them; where `home` is
    "module:upstream", of what the module makes for the modeling module `upstream`.
    """
    name, _, upstream = home.partition(":")
    module = import_module(name)
    return module.replacements(upstream) if upstream else vars(module)


def _blank(home: str, name: str) -> Any:
    cls = replacements(home)[name]
    return cls.__new__(cls)


Sizes = dict[str, tuple[Any, Any]]
"""Name of a part: (what the module has, what its config says)."""


def kinds_of_layers(config: Any) -> list[str]:
    """Return the kind of each decoder layer; a config that does not name them has one kind."""
    layers: int = config.num_hidden_layers
    # hybrids call them otherwise before transformers 5.5
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return list(kinds or ["full_attention"] * layers)[:layers]


def part_at(layer: nn.Module, path: str) -> nn.Module | None:
    """Return what a decoder layer holds at a dotted path, None where there is nothing."""
    for name in path.split("."):
        layer = getattr(layer, name, None)  # type: ignore[assignment]
    return layer


def size_of_linear(layer: Any) -> tuple[int, int]:
    """(out, in) features; adapters and quantised layers keep these names while their weights
    change shape.
    """
    return layer.out_features, layer.in_features


def size_of_norm(norm: Any) -> tuple[int, ...]:
    """Shape of the norm's weight."""
    return size_of(norm.weight)


def size_of(parameter: Any) -> tuple[int, ...]:
    """Shape of a parameter; one that DeepSpeed's ZeRO-3 has sharded is empty and keeps its whole
    shape as `ds_shape`.
    """
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def contract_violations(layer: nn.Module, sizes_of: Callable[[Any], Sizes]) -> list[str]:
    """Return a sentence per part of `layer` that is missing or has another size than its config
    says.
    """
    try:
        sizes = sizes_of(layer)
    except AttributeError as missing:
        return [str(missing)]
    return [
        f"{part} is {found}, its config says {wanted}"
        for part, (found, wanted) in sizes.items()
        if found != wanted
    ]
