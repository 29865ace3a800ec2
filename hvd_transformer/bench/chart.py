"""The chart of `bench allreduce`: time and bus bandwidth by message size."""

import io

from hvd_transformer.bench.allreduce import OURS, AllReduceResult, bus_bandwidth
from hvd_transformer.bench.sizes import show_size

_COLOURS = ("#2265ad", "#d1600a", "#2f8f4e")


def chart(result: AllReduceResult) -> bytes:
    """A PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    times, bandwidths = figure.subplots(1, 2)
    sizes = [row.size for row in result.sizes]
    for name, colour in zip(result.libraries, _COLOURS, strict=False):
        label = f"hvd-transformer over {result.backend}" if name == OURS else name
        seconds = [row.seconds[name] for row in result.sizes]
        bus = [bus_bandwidth(size, own, result.ranks) / 1e6 for size, own in zip(sizes, seconds, strict=True)]
        style = {"color": colour, "marker": "o", "markersize": 3.5, "linewidth": 1.6, "label": label}
        times.loglog(sizes, [1e6 * own for own in seconds], **style)
        bandwidths.semilogx(sizes, bus, **style)
    times.set_ylabel("time (µs)")
    bandwidths.set_ylabel("bus bandwidth (MB/s)")
    for axes in (times, bandwidths):
        axes.set_xlabel("message size (bytes)")
        axes.set_xticks(sizes[::2], [show_size(size) for size in sizes[::2]])
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    times.legend(frameon=False)
    figure.suptitle(f"Allreduce over {result.ranks} ranks on {result.hosts} host{'s' if result.hosts > 1 else ''}")
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()
