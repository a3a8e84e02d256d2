"""The workload `dit`: a diffusion transformer, whose sequence may be divided over the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from raybench.job.answer import Answer
from raybench.workloads.base import Context, Workload, WrongResultError
from raybench.workloads.shapes import DIT_PRESETS
from raybench.workloads.training import AttentionKernel

if TYPE_CHECKING:
    from torch import Tensor

Pixels = Annotated[int, Field(gt=0, description="Pixels of the image; 16 x 16 are a token.")]
# Height and width of a token in pixels: a token has 2 x 2 latents of 8 x 8 pixels.
_TOKEN_PIXELS = 16


class Dit(Workload):
    """Runs the transformer of Flux.1 on one image, whose tokens are divided over the ranks.

    There are no gradients. Weights are random and stored in the type of the precision, without
    autocast. An item is one forward pass, which all ranks finish together; a step of scope loop has
    several items.
    """

    title = "Diffusion transformer"
    takes_batch_size = False
    shares_work = True
    items = "passes"
    answers = (Answer(metric="step_ms_p50", over=("ulysses", "ring", "compile"), best="min"),)

    # Many parameters, because each setting of a job file is one.
    def __init__(
        self,
        context: Context,
        *,
        preset: Annotated[
            Literal["flux", "tiny"], Field(description="Sizes: Flux.1-dev, or some for CPUs.")
        ] = "flux",
        scope: Annotated[
            Literal["double_block", "single_block", "forward", "loop"],
            Field(description="What a step runs: one block, a forward pass, or a loop of them."),
        ] = "forward",
        steps: Annotated[int, Field(gt=0, description="Forward passes of scope loop.")] = 28,
        height: Pixels = 1024,
        width: Pixels = 1024,
        text_tokens: Annotated[int, Field(gt=0, description="Tokens of the text.")] = 512,
        ulysses: Annotated[
            int | None,
            Field(gt=0, description="Ranks that divide the heads. none: world_size / ring."),
        ] = None,
        ring: Annotated[
            int | None,
            Field(gt=0, description="Ranks that pass keys on. none: world_size / ulysses."),
        ] = None,
        ring_kind: Annotated[
            Literal["p2p", "allgather"],
            Field(description="Keys and values go from rank to rank, or are gathered at once."),
        ] = "p2p",
        attention: AttentionKernel = "auto",
        compile: Annotated[
            bool, Field(description="Compile each kind of block; happens in the warm-up.")
        ] = False,
    ) -> None:
        import torch

        from raybench.workloads.attention import form_groups
        from raybench.workloads.dit_model import StepBuilder

        token_rows, token_columns = height // _TOKEN_PIXELS, width // _TOKEN_PIXELS
        # On the meta device one rank computes the whole step.
        is_meta = context.device.type == "meta"
        ulysses_degree, ring_degree = 1, 1
        if not is_meta:
            ulysses_degree, ring_degree = _choose_degrees(context.world_size, ulysses, ring)
        shape = DIT_PRESETS[preset]
        self._context = context
        self._builder = StepBuilder(
            shape=shape,
            rows=token_rows,
            columns=token_columns,
            text_tokens=text_tokens,
            device=context.device,
            dtype=getattr(torch, context.precision.dtype),
            seed=context.seed,
            attention=attention,
            parallel=form_groups(
                context.rank, ulysses=ulysses_degree, ring=ring_degree, ring_kind=ring_kind
            ),
            compile=compile and not is_meta,
        )
        self._step = self._builder.make(scope, steps)
        self.output: Tensor | None = None
        self.items_per_step = passes = steps if scope == "loop" else 1
        # Declare the FLOPs, because counting them on the meta device takes a minute for a loop.
        flops = passes * shape.flops(scope, text=text_tokens, image=token_rows * token_columns)
        self.flops_per_step = flops / context.world_size

    def step(self) -> None:
        """Run the block, pass or loop that `scope` names, and set `output`. Collective."""
        import torch

        with torch.inference_mode():
            self.output = self._step()

    def check(self) -> None:
        """Raise WrongResultError if the last output is not finite or the division is wrong.

        The division is wrong if a small divided model differs from the undivided model by more than
        `TOLERANCES`. Collective.
        """
        from raybench.workloads.dit_model import TOLERANCES, difference_to_whole

        subject = f"rank {self._context.rank}: dit in {self._context.precision}"
        # Call this before any rank raises, because it is collective.
        error, allowed = difference_to_whole(self._builder), TOLERANCES[self._context.precision]
        if self.output is not None and not bool(self.output.isfinite().all()):
            raise WrongResultError(f"{subject} left an output that is not finite")
        # Not `error > allowed`, so that NaN fails, too.
        if not error <= allowed:
            raise WrongResultError(
                f"{subject}, divided over {self._context.world_size} ranks, differs "
                f"from the whole by {error:.2g} of it; rounding explains {allowed:g}"
            )

    @classmethod
    def why_not(cls, settings: Mapping[str, Any]) -> str | None:
        """Return why these settings cannot run, in one sentence; None if they can."""
        world_size = settings["world_size"]
        ulysses, ring = _choose_degrees(world_size, settings.get("ulysses"), settings.get("ring"))
        if ulysses * ring != world_size:
            return (
                f"ulysses {ulysses} x ring {ring} must be world_size {world_size}; "
                "give one of the two, and the other follows"
            )
        heads = DIT_PRESETS[settings["preset"]].heads
        if heads % ulysses:
            return f"ulysses {ulysses} must divide the {heads} heads"
        height, width, text = (settings[name] for name in ("height", "width", "text_tokens"))
        tokens = (height // _TOKEN_PIXELS) * (width // _TOKEN_PIXELS)
        if height % _TOKEN_PIXELS or width % _TOKEN_PIXELS:
            return f"height {height} and width {width} must be multiples of 16 pixels"
        if tokens % world_size:
            return (
                f"{tokens} tokens of height {height} x width {width} cannot be divided by "
                f"{world_size} ranks; take a height of a multiple of {world_size * _TOKEN_PIXELS}"
            )
        if text % world_size:
            return f"text_tokens {text} must be a multiple of the {world_size} ranks"
        if ring > 1 and settings["attention"] == "math" and settings["ring_kind"] == "p2p":
            return (
                "attention math gives no log-sum-exp, by which a ring merges its parts; "
                "take flash, or ring_kind: allgather, which merges none"
            )
        return None

    @classmethod
    def parameter_count(cls, params: Mapping[str, str]) -> int | None:
        """Return the number of parameters of the block or model; None without a known preset."""
        shape = DIT_PRESETS.get(params.get("preset", ""))
        return None if shape is None else shape.parameter_count(params.get("scope"))


def _choose_degrees(world_size: int, ulysses: int | None, ring: int | None) -> tuple[int, int]:
    """Return ulysses and ring; choose a missing degree so that their product is world_size."""
    if ulysses is None:
        ring = ring or 1
        return max(1, world_size // ring), ring
    return ulysses, ring or max(1, world_size // ulysses)
