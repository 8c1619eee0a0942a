"""The keywords of a forward for media."""

from __future__ import annotations

FEATURES = {"image": "pixel_values", "video": "pixel_values_videos", "audio": "input_features"}
"""{kind of media: keyword of its values}."""
SIZES = {"image": "image_grid_thw", "video": "video_grid_thw", "audio": "feature_attention_mask"}
"""{kind of media: keyword of the sizes of its items}."""
PIXELS = {SIZES[kind]: FEATURES[kind] for kind in ("image", "video")}
"""{keyword of grids: keyword of the patches that the grids count}."""
AUDIO_SIZES = (SIZES["audio"], "audio_feature_lengths")
"""The keywords for the sizes of audios, of which one is enough."""
SECONDS = ("second_per_grid_ts", "video_second_per_grid")
"""The keywords for the seconds between two grids of a video."""
OF_ITEMS = (*FEATURES.values(), *PIXELS, *AUDIO_SIZES)
"""The keywords for the values of media and the sizes of their items."""
