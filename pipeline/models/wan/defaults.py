"""What the authors of Wan recommend for each of its models, where it differs from diffusers' defaults.

The sources are the authors' generate.py and configs. diffusers has 50 steps, guidance 5, a shift of 3 and no negative
prompt for all of them.
"""

from dataclasses import dataclass

#: The authors' negative prompt: bright colors, overexposure, stills, blurred details, subtitles, paintings, the worst
#: quality, JPEG artifacts, deformed limbs, fused fingers, crowded backgrounds, walking backwards and the like.
_UNWANTED = """\
色调艳丽 过曝 静态 细节模糊不清 字幕 风格 作品 画作 画面 静止 整体发灰 最差质量 低质量 JPEG压缩残留
丑陋的 残缺的 多余的手指 画得不好的手部 画得不好的脸部 畸形的 毁容的 形态畸形的肢体 手指融合
静止不动的画面 杂乱的背景 三条腿 背景人很多 倒着走"""
NEGATIVE_PROMPT = "\uff0c".join(_UNWANTED.split())  # with full-width commas
#: The shift that diffusers' conversion script writes into every UniPC config, whatever the authors recommend.
CONVERTED_SHIFT = 3.0
#: Videos of at most this many pixels a frame count as 480p.
PIXELS_480P = 832 * 480


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """The defaults of one published model; names of fields are those of the parameters."""

    #: Its name in messages.
    title: str
    frames: int = 81
    fps: int = 16
    width: int = 832
    height: int = 480
    steps: int = 40
    #: Of both experts, where there are two.
    guidance_scale: float
    negative_prompt: str = NEGATIVE_PROMPT
    #: The default of flow_shift, above and at 480p.
    shift: float = 5.0
    shift_480p: float = 5.0


#: Two experts.
I2V_A14B = Defaults(title="Wan 2.2 I2V-A14B", guidance_scale=3.5)
#: One transformer, and CLIP's image encoder.
I2V_14B = Defaults(title="Wan 2.1 I2V-14B", guidance_scale=5.0, shift_480p=3.0)
#: One transformer that denoises the frames after the photo's (expand_timesteps).
TI2V_5B = Defaults(title="Wan 2.2 TI2V-5B", frames=121, fps=24, width=1280, height=704, steps=50, guidance_scale=5.0)
