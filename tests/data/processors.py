"""Processors made here, without a download: a vocabulary of letters, pictures through the real
image processor, drawn videos.

Video processors, and with them the processors' own check of their parts, need torchvision; the one
here does without.
"""

from __future__ import annotations

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BatchFeature,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen3OmniMoeProcessor,
    Qwen3VLProcessor,
    WhisperFeatureExtractor,
)
from transformers.video_utils import VideoMetadata

from tests.vision import IMAGE

try:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil as ImageProcessor,
    )
except ImportError:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import (
        Qwen2VLImageProcessor as ImageProcessor,
    )

PATCH, MERGE, TIME = 4, 2, 2
NAMED = {
    "pad_token": "<pad>",
    "eos_token": "<eos>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|audio_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
VISION = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
SPECIAL = [
    *(token for token in NAMED.values() if token not in VISION),
    "<|im_start|>",
    "<|im_end|>",
]
TIMES = [f"<{tenths / 10:.1f}" for tenths in range(60)]
WORDS = ["<unk>", "user", "assistant", "seconds>", *TIMES, *"abcdefghijklmnopqrstuvwxyz"]
TEMPLATE = """{%%- for message in messages -%%}
<|im_start|>{{ message.role }} {%% if message.role == 'assistant' -%%}
{%%- generation -%%}{%%- for part in message.content -%%}{{ part.text }} {%% endfor -%%}<|im_end|>{%%- endgeneration -%%}
{%%- else -%%}{%%- for part in message.content -%%}
{%%- if part.type == 'image' -%%}<|vision_start|><|image_pad|><|vision_end|>
{%%- elif part.type == 'video' -%%}%s<|video_pad|>%s
{%%- elif part.type == 'audio' -%%}<|audio_start|><|audio_pad|><|audio_end|>
{%%- else -%%}{{ part.text }} {%% endif -%%}{%%- endfor -%%}<|im_end|>{%%- endif -%%}
{%%- endfor -%%}"""


class DrawnVideos:
    """What the processors read of a video processor, for videos of one size [frames, H, W, 3] at
    two frames a second.
    """

    merge_size, temporal_patch_size, patch_size = MERGE, TIME, PATCH
    model_input_names = ["pixel_values_videos", "video_grid_thw"]

    def fetch_videos(self, videos, **kwargs):
        return videos, [None] * len(videos)

    def __call__(self, videos=None, **kwargs):
        films = [
            film
            for group in videos
            for film in (group if isinstance(group, (list, tuple)) else [group])
        ]
        grids = [
            (len(film) // TIME, film.shape[1] // PATCH, film.shape[2] // PATCH) for film in films
        ]
        pixels = [
            torch.from_numpy(film).float().reshape(np.prod(grid), -1) / 255
            for film, grid in zip(films, grids)
        ]
        seen = [
            VideoMetadata(
                total_num_frames=len(film), fps=2.0, frames_indices=list(range(len(film)))
            )
            for film in films
        ]
        return BatchFeature(
            {
                "pixel_values_videos": torch.cat(pixels),
                "video_grid_thw": torch.tensor(grids),
                "video_metadata": seen,
            }
        )


class WithoutTorchvision:
    """Takes its parts as they are."""

    def check_argument_for_proper_class(self, name, argument):
        """Upstream looks the classes up in tables that need torchvision."""
        return type(argument)


class TinyVL(WithoutTorchvision, Qwen3VLProcessor):
    """Of Qwen3-VL and Qwen3.5."""


class Tiny25VL(WithoutTorchvision, Qwen2_5_VLProcessor):
    """Of Qwen2.5-VL."""


class TinyOmni(WithoutTorchvision, Qwen3OmniMoeProcessor):
    """Of Qwen3-Omni."""


def tokenizer() -> PreTrainedTokenizerFast:
    """One word per token; the ids of media are those of `tests.vision.tiny_vision`."""
    words = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    unused = {f"unused{number}": number for number in range(len(words), IMAGE)}
    words |= unused | {word: number for number, word in enumerate(VISION, IMAGE)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=plain, **{name: NAMED[name] for name in ("pad_token", "eos_token")}
    )
    made.add_special_tokens({"additional_special_tokens": [*SPECIAL[2:], *VISION]})
    return made


def images() -> ImageProcessor:
    """Upstream's, for pictures of 8 to 64 pixels."""
    return ImageProcessor(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=TIME,
        min_pixels=8 * 8,
        max_pixels=64 * 64,
    )


def vision_processor(cls=TinyVL):
    """A processor of images and videos; Qwen3-VL's writes the tokens around each frame itself."""
    marks = ("", "") if issubclass(cls, TinyVL) else ("<|vision_start|>", "<|vision_end|>")
    return cls(images(), tokenizer(), DrawnVideos(), chat_template=TEMPLATE % marks)


def omni_processor():
    """A processor of images, videos and audio of 16 mel bins."""
    named = tokenizer()
    for name, token in NAMED.items():
        if not hasattr(named, name):
            setattr(named, name, token)
            setattr(named, f"{name}_id", named.convert_tokens_to_ids(token))
    ears = WhisperFeatureExtractor(feature_size=16, sampling_rate=16000, hop_length=160, n_fft=400)
    template = TEMPLATE % ("<|vision_start|>", "<|vision_end|>")
    return TinyOmni(images(), DrawnVideos(), ears, named, chat_template=template)


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """A picture of noise."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def film(frames: int = 4, height: int = 16, width: int = 16, seed: int = 0) -> np.ndarray:
    """A video of noise."""
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def sound(frames: int, seed: int = 0) -> np.ndarray:
    """Noise of so many frames of 10 ms."""
    return np.random.default_rng(seed).standard_normal(frames * 160).astype(np.float32)


def example(*parts, answer: str = "d e") -> dict:
    """A user's turn of text (a string) and media (a dict), and an answer."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    }


def image_part(height: int = 16, width: int = 24, seed: int = 0) -> dict:
    """A part with its picture."""
    return {"type": "image", "image": picture(height, width, seed)}


def video_part(seed: int = 0) -> dict:
    """A part with a video of two grids."""
    return {"type": "video", "video": film(seed=seed)}


def audio_part(frames: int, seed: int = 0) -> dict:
    """A part with a sound."""
    return {"type": "audio", "audio": sound(frames, seed)}
