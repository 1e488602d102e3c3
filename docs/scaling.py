"""The arithmetic of docs/scaling.md: its table, and its picture.

`python docs/scaling.py` prints the one and draws the other into docs/images/scaling.png. Rates are
read from a committed run on one GPU; everything about several devices is computed, not measured.
"""

import json
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUN = HERE.parent / "benchmarks" / "results" / "nvidia-h200-2026-11-16.json"
PICTURE = HERE / "images" / "scaling.png"

# Assumptions. Bytes per second out of one device; the first eight share a machine.
NVLINK, NETWORK, IN_A_MACHINE = 450e9, 400e9 / 8, 8
LATENCY = 10e-6  # seconds until a message of no length is there
HEADS = 16  # of queries; they travel together
PIECES, LEAST = 16, 2048  # how regard.pool.ring cuts a shard of keys on a GPU


@dataclass(frozen=True)
class Work:
    """What attention asks for, per head.

    Attributes:
        width: of the inner product that makes a score.
        values: width of a value.
        sent: bytes of one key and its value.
        shared_by: query heads that share a key head.
        case: whose measured rate is used.
    """

    name: str
    width: int
    values: int
    sent: int
    case: str
    shared_by: int = 1

    def rate(self):
        """Measured operations per second of one device."""
        rows = json.loads(RUN.read_text())["rows"]
        found = [row for row in rows if row["case"] == self.case and row["who"] == "regard"]
        return found[0]["tflops"] * 1e12

    def flops(self):
        """Of one pair of query and key: two products, forward."""
        return 2 * (self.width + self.values)

    def step_seconds(self, queries, keys):
        """Pooling over one piece of the keys."""
        return HEADS * queries * keys * self.flops() / self.rate()

    def send_seconds(self, keys, link):
        """Sending them on, in pieces."""
        pieces = max(1, min(PIECES, keys // LEAST))
        return HEADS * keys * self.sent / self.shared_by / link + pieces * LATENCY

    def least_queries(self, link):
        """Queries per device from which sending takes no longer than pooling; without latency."""
        return self.rate() * self.sent / (self.shared_by * self.flops() * link)


WORKS = (
    Work("dot product, D = V = 128", 128, 128, 2 * (128 + 128), "dot_long"),
    Work("the same, 8 query heads per key head", 128, 128, 2 * (128 + 128), "dot_long", 8),
    # Compact rows travel, h numbers of float32; features of width 2Rh are made where they arrive.
    Work("additive, h = V = 64, R = 8", 2 * 8 * 64, 64, 4 * 64 + 2 * 64, "kernel_1024"),
)


def seconds(work, tokens, devices):
    """The forward pass over so many tokens: a ring is as fast as its slowest link."""
    share = tokens / devices
    pool = work.step_seconds(share, share)
    if devices == 1:
        return pool
    link = NVLINK if devices <= IN_A_MACHINE else NETWORK
    return devices * max(pool, work.send_seconds(share, link))


def speedup(work, tokens, devices):
    return seconds(work, tokens, 1) / seconds(work, tokens, devices)


def table():
    lines = [
        "| work | operations per pair | bytes per key | measured rate | overlaps on NVLink from | "
        "overlaps on the network from |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for work in WORKS:
        lines.append(
            f"| {work.name} | {work.flops():,} | {work.sent / work.shared_by:.0f} | "
            f"{work.rate() / 1e12:.0f} TFLOP/s | {work.least_queries(NVLINK):,.0f} tokens | "
            f"{work.least_queries(NETWORK):,.0f} tokens |"
        )
    return lines


def draw():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    devices = [2**power for power in range(9)]
    figure, panel = plt.subplots(figsize=(7, 4.6), layout="constrained")
    panel.plot(devices, devices, color="0.6", linewidth=1, linestyle=":", label="ideal")
    for work, color in zip(WORKS, ("C0", "C2", "C1"), strict=True):
        for tokens, style in ((1 << 20, "-"), (1 << 17, "--")):
            curve = [speedup(work, tokens, count) for count in devices]
            label = f"{work.name}, {tokens:,} tokens"
            panel.plot(devices, curve, style, color=color, marker="o", markersize=3, label=label)
    panel.axvline(IN_A_MACHINE, color="0.8", linewidth=1, zorder=0)
    panel.text(IN_A_MACHINE * 1.05, 1.1, "one machine | several", color="0.4", fontsize=8)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    panel.set_xticks(devices, [str(count) for count in devices])
    panel.set_yticks(devices, [str(count) for count in devices])
    panel.set(
        xlabel="devices",
        ylabel="times as fast as one device",
        title="Ring attention, forward: computed, not measured",
    )
    panel.legend(fontsize=7)
    figure.savefig(PICTURE, dpi=130)


if __name__ == "__main__":
    print("\n".join(table()))
    for one in WORKS:
        for length in (1 << 20, 1 << 17):
            grown = [
                f"{count}: {speedup(one, length, count):.1f}" for count in (8, 16, 32, 64, 256)
            ]
            print(one.name, length, *grown)
    draw()
    print(PICTURE)
