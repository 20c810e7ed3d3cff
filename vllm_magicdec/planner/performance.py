# SPDX-License-Identifier: Apache-2.0
"""MagicDec's speedup model of speculation over a sparse view, on a roofline.

Eq. 1 to 3 of MagicDec (arXiv 2408.11049) compute a speedup from three times: T_T of a plain decode step,
T_D of a draft step and T_V(gamma) of a verification. `Deployment` predicts the times from a model's shape
and a device's data sheet. Times are milliseconds per pass, contexts tokens per request, batches requests.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from vllm_magicdec.planner.shapes import ModelShape

GIB = 2**30
_MAX_CONTEXT = 2**20  # tokens; the longest at which speculation may begin to pay


def tokens_per_round(gamma: int, alpha: float) -> float:
    """Return Omega(gamma, alpha) = (1 - alpha^(gamma+1)) / (1 - alpha), the expected tokens per round."""
    return sum(alpha**i for i in range(gamma + 1))  # also defined at alpha = 1


def acceptance_rate(gamma: int, omega: float) -> float:
    """Return the alpha at which Omega(gamma, alpha) is `omega`.

    Raises:
        ValueError: `omega` is outside [1, gamma + 1].
    """
    if gamma < 1 or not 1 <= omega <= gamma + 1:
        raise ValueError(f"{omega:g} tokens per round are not possible with {gamma} drafted tokens")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_round(gamma, middle) < omega else (low, middle)
    return (low + high) / 2


def round_ms(gamma: int, draft_ms: float, verify_ms: float, extra_ms: float = 0.0) -> float:
    """Return gamma * T_D + T_V(gamma) + T_select; MagicDec has the last term since its ICLR 2025 version.

    `extra_ms`, T_select, is the time of a round outside the forward passes.
    """
    return gamma * draft_ms + verify_ms + extra_ms


def speedup(plain_step_ms: float, omega: float, one_round_ms: float) -> float:
    """Return Omega * T_T / (gamma * T_D + T_V) (MagicDec)."""
    return omega * plain_step_ms / one_round_ms


@dataclass(frozen=True)
class Hardware:
    """Data-sheet values of one device."""

    name: str
    memory_gib: float
    memory_bytes_per_s: float
    flops: float  # dense bf16 FLOP/s
    interconnect_bytes_per_s: float  # one direction; 0 without an interconnect
    source: str


@dataclass(frozen=True)
class Costs:
    """Efficiencies and overheads that a data sheet does not state.

    The constants marked *fit* minimise the squared relative error of T_T over the paper's 36 measured plain
    steps on 8 x A100 and 4 x H100 (Tables 1 and 2, `target_ms`); tests/planner/test_performance.py repeats
    the fit. The *fixed* ones were set beforehand to typical values of large kernels. docs/performance.md
    states the errors.
    """

    memory_efficiency: float = 0.86  # of the bandwidth; fit
    compute_efficiency: float = 0.7  # of the FLOP/s; fixed
    # Attention's further factors: 1 on GPUs, far less with vLLM's CPU kernel.
    attention_memory_efficiency: float = 1.0
    attention_compute_efficiency: float = 1.0
    interconnect_efficiency: float = 0.7  # of the bandwidth; fixed
    layer_overhead_us: float = 33.0  # per layer and pass: launches, kernels that read no weights; fit
    token_overhead_us: float = 0.6  # per layer and query token: activations, sampling; fit
    all_reduce_step_us: float = 5.1  # latency of one of the 2 (tp - 1) steps of a ring; fit
    # Rejection sampling and host work: median over Table 1 of specdec_ms_per_token * Omega - gamma T_D -
    # T_V. It does not include a policy's selection.
    round_overhead_ms: float = 1.45
    memory_utilization: float = 0.92  # vLLM's default; fixed
    reserved_gib: float = 2.0  # activations and CUDA graphs; fixed


@dataclass(frozen=True)
class Choice:
    """The best way to draft at one batch and context."""

    gamma: int
    budget: int  # tokens
    speedup: float


@dataclass(frozen=True)
class Deployment:
    """A model and its draft on `tensor_parallel` devices.

    Raises:
        ValueError: the heads cannot be divided, or the devices are not connected.
    """

    shape: ModelShape
    hardware: Hardware
    tensor_parallel: int = 1
    costs: Costs = field(default_factory=Costs)
    draft: ModelShape | None = None  # None: the model itself drafts
    draft_weight_bytes: float | None = None  # of linear layers, if the draft is a quantised copy

    def __post_init__(self) -> None:
        tp, shape = self.tensor_parallel, self.shape
        if tp < 1 or shape.num_heads % tp:
            raise ValueError(
                f"{shape.num_heads} attention heads cannot be divided over {tp} devices; use a divisor"
            )
        if tp > 1 and not self.hardware.interconnect_bytes_per_s:
            raise ValueError(f"{self.hardware.name} has no interconnect; use a tensor parallel size of 1")
        if self.draft_weight_bytes is not None and (self.draft is not None or shape.num_experts > 1):
            raise ValueError(
                "draft weights are for drafts by the model itself, without experts; leave them out"
            )
        if self.draft is not None and self.draft.num_heads % tp:
            raise ValueError(
                f"the draft's {self.draft.num_heads} attention heads cannot be divided over {tp} devices; "
                "use a divisor"
            )

    @property
    def title(self) -> str:
        """Name of model, devices and draft."""
        draft = f", drafts by {self.draft.name}" if self.draft else ""
        if self.draft_weight_bytes is not None:
            draft = f", drafts with {self.draft_weight_bytes:g} bytes per weight"
        return f"{self.shape.name} on {self.tensor_parallel} x {self.hardware.name}{draft}"

    @cached_property
    def drafting(self) -> "Deployment":
        """The deployment of the draft passes: the draft model on the same devices, or this one."""
        if self.draft is not None:
            return replace(self, shape=self.draft, draft=None)
        if self.draft_weight_bytes is None:
            return self
        shape = self.shape
        unembedding = shape.vocab_size * shape.hidden_size * shape.weight_bytes
        mean = (self._copy_bytes + unembedding) / shape.parameters_read(1)
        return replace(self, shape=replace(shape, weight_bytes=mean), draft_weight_bytes=None)

    @property
    def _copy_bytes(self) -> float:
        """Bytes of the quantised copies of all linear layers; the unembedding is the model's own."""
        shape = self.shape
        parameters = shape.parameters_read(1) - shape.vocab_size * shape.hidden_size
        return parameters * (self.draft_weight_bytes or 0.0)

    @property
    def kv_bytes_per_token(self) -> float:
        """K/V bytes per token and device, which holds at least one K/V head."""
        heads = max(1.0, self.shape.num_kv_heads / self.tensor_parallel)
        return self.shape.kv_bytes_per_token / self.shape.num_kv_heads * heads

    def linear_ms(self, query_tokens: int) -> tuple[float, float]:
        """Return compute and memory time of all linear layers in a pass over `query_tokens`."""
        flops = self.shape.linear_flops_per_token * query_tokens
        weights = self.shape.parameters_read(query_tokens) * self.shape.weight_bytes
        return self._roofline_ms(flops / self.tensor_parallel, weights / self.tensor_parallel)

    def attention_ms(self, batch: int, queries: int, context: int) -> tuple[float, float]:
        """Return compute and memory time of all attention in a pass with `queries` tokens per request."""
        shape, costs = self.shape, self.costs
        tokens = batch * context * shape.kv_share(context)
        flops = 4 * shape.num_layers * shape.num_heads * shape.head_size * queries * tokens
        compute, memory = self._roofline_ms(flops / self.tensor_parallel, tokens * self.kv_bytes_per_token)
        return compute / costs.attention_compute_efficiency, memory / costs.attention_memory_efficiency

    def _roofline_ms(self, flops: float, num_bytes: float) -> tuple[float, float]:
        compute_s = flops / (self.hardware.flops * self.costs.compute_efficiency)
        memory_s = num_bytes / (self.hardware.memory_bytes_per_s * self.costs.memory_efficiency)
        return compute_s * 1e3, memory_s * 1e3

    def all_reduce_ms(self, query_tokens: int) -> float:
        """Return the time of all layers' two ring all-reduces.

        Each has 2 (tp - 1) steps, and each step takes its latency plus the transfer of 1/tp of the data
        (Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH").
        """
        tp, shape = self.tensor_parallel, self.shape
        if tp == 1:
            return 0.0
        bandwidth = self.hardware.interconnect_bytes_per_s * self.costs.interconnect_efficiency
        transfer_s = query_tokens * shape.hidden_size * 2 / tp / bandwidth
        step_s = self.costs.all_reduce_step_us * 1e-6 + transfer_s
        return 2 * shape.num_layers * 2 * (tp - 1) * step_s * 1e3

    def forward_ms(self, batch: int, queries: int, context: int) -> float:
        """Return the time of a pass of `queries` tokens per request over `context` tokens of K/V.

        The roofline takes the larger of compute and memory time, as SPIRe (arXiv 2504.06419) does, but for
        linear layers and attention separately, because their kernels run in sequence.
        """
        query_tokens = batch * queries
        linear, attention = self.linear_ms(query_tokens), self.attention_ms(batch, queries, context)
        work = max(linear) + max(attention) + self.all_reduce_ms(query_tokens)
        overhead_us = self.costs.layer_overhead_us + self.costs.token_overhead_us * query_tokens
        return work + self.shape.num_layers * overhead_us * 1e-3

    def plain_step_ms(self, batch: int, context: int) -> float:
        """Return T_T."""
        return self.forward_ms(batch, 1, context)

    def draft_step_ms(self, batch: int, context: int, budget: int) -> float:
        """Return T_D, the time of one draft step over `budget` tokens."""
        return self.drafting.forward_ms(batch, 1, min(context, budget))

    def verify_ms(self, gamma: int, batch: int, context: int) -> float:
        """Return T_V(gamma), the time of a pass over the drafted tokens and the last verified one."""
        return self.forward_ms(batch, gamma + 1, context)

    def catch_up_ms(self, gamma: int, batch: int) -> float:
        """Return the time per round in which a draft model's K/V catch up with the verified tokens.

        A SPIRe draft projects the target's activations of all tokens to keys and values in one call. Other
        drafts need at most one more token in their first pass, which is not counted.
        """
        if self.draft is None or not self.draft.is_spire:
            return 0.0
        shape, costs, tokens = self.draft, self.costs, batch * (gamma + 1)
        parameters = shape.num_layers * shape.key_value_parameters / self.tensor_parallel
        roofline = self._roofline_ms(2 * parameters * tokens, parameters * shape.weight_bytes)
        overhead_us = costs.layer_overhead_us + shape.num_layers * costs.token_overhead_us * tokens
        return max(roofline) + overhead_us * 1e-3

    def round_ms(self, gamma: int, batch: int, context: int, budget: int) -> float:
        """Return the time of a round of `gamma` drafts, overheads included."""
        extra_ms = self.costs.round_overhead_ms + self.catch_up_ms(gamma, batch)
        draft_ms = self.draft_step_ms(batch, context, budget)
        return round_ms(gamma, draft_ms, self.verify_ms(gamma, batch, context), extra_ms)

    def speedup(self, alpha: float, gamma: int, batch: int, context: int, budget: int) -> float:
        """Return the speedup of speculation over plain decoding."""
        one_round_ms = self.round_ms(gamma, batch, context, budget)
        return speedup(self.plain_step_ms(batch, context), tokens_per_round(gamma, alpha), one_round_ms)

    def best(
        self, alphas: Mapping[int, float], max_gamma: int, batch: int, context: int, min_gamma: int = 1
    ) -> Choice:
        """Return the fastest gamma in [min_gamma, max_gamma] and budget.

        `alphas` has the acceptance rate of every budget (tokens) to consider.
        """
        choices = (
            Choice(gamma, budget, self.speedup(alpha, gamma, batch, context, budget))
            for budget, alpha in alphas.items()
            for gamma in range(min_gamma, max_gamma + 1)
        )
        return max(choices, key=lambda choice: choice.speedup)

    def inflection_context(
        self, alphas: Mapping[int, float], max_gamma: int, batch: int, min_gamma: int = 1
    ) -> int | None:
        """Return S_inflection, the shortest context from which on speculation pays, or None, by bisection.

        In self-speculation the speedup crosses 1 at most once, because beyond the budget T_T and T_V grow
        with the context and T_D does not. A draft model may also pay at the shortest contexts, so the
        search then begins at the last power of two where it does not pay.
        """

        def pays(context: int) -> bool:
            return self.best(alphas, max_gamma, batch, context, min_gamma).speedup >= 1

        low, high = 0, _MAX_CONTEXT
        if not pays(high):
            return None
        if self.draft is not None:
            while (half := high // 2) and pays(half):
                high = half
            low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if pays(middle) else (middle, high)
        return high

    def free_queries(self, batch: int, context: int) -> int:
        """Return the query tokens per request up to which compute time stays below memory time.

        This is SSSD's budget of free tokens (arXiv 2411.05894), the smaller of linear layers' and
        attention's. With experts it is a lower bound, because more tokens read more experts.
        """
        linear_compute, linear_memory = self.linear_ms(batch)
        attention_compute, attention_memory = self.attention_ms(batch, 1, context)
        return int(min(linear_memory / linear_compute, attention_memory / attention_compute))

    def kv_bytes_per_context_token(self, context: int) -> float:
        """Return the bytes per context token and device, including all pages of a draft model."""
        own = self.kv_bytes_per_token * self.shape.kv_share(context)
        return own if self.draft is None else own + self.drafting.kv_bytes_per_context_token(context)

    def kv_capacity_tokens(self, context: int = 1) -> int:
        """Return the number of tokens whose K/V fit beside the weights; 0 if the weights do not fit.

        Of the `context` tokens of each request, layers with a window keep only the window.
        """
        costs = self.costs
        usable = (self.hardware.memory_gib * costs.memory_utilization - costs.reserved_gib) * GIB
        models = (self.shape,) if self.draft is None else (self.shape, self.draft)
        weights = sum(model.parameters * model.weight_bytes for model in models) + self._copy_bytes
        weights /= self.tensor_parallel
        return max(0, int((usable - weights) / self.kv_bytes_per_context_token(context)))
