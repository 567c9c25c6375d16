"""What a profile says, on one screen."""

from rich.table import Table

from megatron.oases.cost.profile_file import APART, OperationCell, Optimizer, Overhead, Profile
from megatron.oases.schedule import Kind, Role
from megatron.oases.sizes import counted


def operations_table(profile: Profile) -> Table:
    """The operations of the whole micro-batch, by TP degree."""
    layout = profile.fingerprint.layout
    degrees = sorted({cell.degree for cell in profile.operations}, reverse=True)
    table = Table(
        title=f"Operations on {counted(layout.micro_batch, 'sample')}, ms",
        title_justify="left",
        caption="Median; in brackets the distance between the quartiles. Of each repeat the slowest rank counts.",
        caption_justify="left",
    )
    for heading in ("part", "operation", "graphs"):
        table.add_column(heading, no_wrap=True)
    for degree in degrees:
        table.add_column(f"degree {degree}", justify="right", no_wrap=True)
    rows: dict[tuple, dict[int, OperationCell]] = {}
    for cell in profile.operations:
        if cell.samples == layout.micro_batch:
            rows.setdefault((cell.role, cell.kind, cell.kept), {})[cell.degree] = cell
    roles, kinds = list(Role), list(Kind)
    for role, kind, kept in sorted(rows, key=lambda row: (roles.index(row[0]), kinds.index(row[1]), row[2])):
        cells = rows[role, kind, kept]
        shown = [_shown(cells[degree]) if degree in cells else "–" for degree in degrees]
        table.add_row(role.value, kind.value, "kept" if kept else "recomputed", *shown)
    return table


def collectives_table(profile: Profile) -> Table:
    table = Table(
        title="Collectives",
        title_justify="left",
        caption="Fitted on relative error, with its root mean square at the measured sizes. Held out: median error "
        "with which the other sizes give one between them.",
        caption_justify="left",
    )
    for heading in ("collective", "ranks x\nstride"):
        table.add_column(heading, no_wrap=True)
    for heading in ("latency\nms", "Gbit/s", "fit\nerror", "held\nout", "largest\nMiB", "takes\nms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for series in profile.collectives:
        names = (series.collective.value, f"{series.group_size} x {series.stride}")
        if series.missing is not None:
            table.add_row(*names, *["–"] * 6)
            continue
        largest = series.points[-1]
        table.add_row(
            *names,
            f"{series.fit.latency_ms:.3f}",
            f"{series.fit.gbps:.3f}",
            f"{series.fit.residual:.0%}",
            "–" if series.held_out_error is None else f"{series.held_out_error:.0%}",
            f"{largest.size_bytes / 2**20:.2f}",
            f"{largest.median_ms:.2f}",
        )
    return table


def remarks(profile: Profile) -> list[str]:
    """The rest, a line each."""
    held_out = profile.held_out
    lines = [
        f"operations: quartiles lie {profile.spread:.0%} of an operation's time apart",
        _passes(profile),
        f"optimizer: {_optimizer(profile.optimizer)}",
        f"rest of an iteration: {_overhead(profile.overhead)}",
    ]
    if profile.disturbance is not None:
        lines.append(f"disturbed: {profile.disturbance}; take the profile again with nothing else running")
    for cell in profile.contention:
        factors = cell.missing
        if factors is None:
            factors = f"computation x {cell.compute:.2f}, communication x {cell.communication:.2f}"
        lines.append(f"contention with {cell.group_size} ranks, {cell.stride} apart: {factors}")
    for cell in profile.vanilla:
        how = "with graphs kept" if cell.kept else "recomputed"
        lines.append(
            f"Megatron itself, {how}: {cell.missing or f'computes {cell.factor:.3f} times as long as its operations'}"
        )
    if held_out.operations_median is not None:
        lines.append(
            f"held out: the other numbers of samples give an operation's time with an error of "
            f"{held_out.operations_median:.1%} (median), {held_out.operations_worst:.1%} (worst)"
        )
    for cell in profile.memory:
        if cell.missing is None:
            how = "graphs kept" if cell.kept else "recomputed"
            lines.append(
                f"memory, degree {cell.degree}, {counted(cell.layers, 'layer')}, {counted(cell.samples, 'sample')}, "
                f"{how}: peak {cell.peak_bytes / 2**20:.0f} MiB, parameters {cell.parameters_bytes / 2**20:.0f} MiB"
            )
    sections = (profile.operations, profile.collectives, profile.contention, profile.vanilla, profile.memory)
    missing = [cell for section in sections for cell in section if cell.missing]
    for reason in sorted({cell.missing for cell in missing}):
        lines.append(f"missing: {sum(cell.missing == reason for cell in missing)} measurements: {reason}")
    return lines


def _passes(profile: Profile) -> str:
    """How many measurements came out differently in the two passes, and which most."""
    apart, all_of_them = profile.apart, counted(len(profile.in_passes), "measurement")
    line = f"two passes: {len(apart)} of {all_of_them} differ by more than {APART:.0%}"
    if apart:
        worst = max(apart, key=lambda cell: cell.passes_apart)
        line += f", most of all, by {worst.passes_apart:.0%}, {worst}"
    return line


def _optimizer(optimizer: Optimizer) -> str:
    if optimizer.missing is not None:
        return optimizer.missing
    return (
        f"{optimizer.fixed_ms:.2f} ms + {optimizer.ns_per_parameter:.3f} ns a parameter "
        f"(error {optimizer.residual:.1%} at {counted(len(optimizer.points), 'point')})"
    )


def _overhead(overhead: Overhead) -> str:
    return overhead.missing or f"{overhead.fixed_ms:.2f} ms + {overhead.per_micro_batch_ms:.2f} ms a micro-batch"


def _shown(cell: OperationCell) -> str:
    return "–" if cell.missing is not None else f"{cell.median_ms:.3f} ({cell.spread_ms:.3f})"
