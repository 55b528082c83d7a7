"""What a user should be warned of, read off a step's metrics."""

from dapo_megatron.monitoring.metrics import Record, number

LOG_RATIO_LIMIT = 1e-3
STALE_LIMIT = 0.5  # share of a batch's tokens


def warnings_of(record: Record) -> list[str]:
    """One sentence for each thing about a step that is not as it should be."""
    step, found = record["step"], []
    if record.get("skipped"):
        found.append(f"step {step} was skipped: no group with right and wrong answers within the sampling budget")
    elif record.get("exhausted"):
        found.append(f"step {step}: the sampling budget was used up, trained on the {record['kept']:.0f} groups kept")
    if record.get("first_log_ratio", 0.0) > LOG_RATIO_LIMIT:
        found.append(
            f"step {step}: the first update did not start on-policy, mean |log r| = {record['first_log_ratio']:.1e}"
        )
    if number(record, "stale_masked") > STALE_LIMIT:
        found.append(f"step {step}: {record['stale_masked']:.0%} of the tokens were too old and left the loss")
    if record.get("failed"):
        found.append(f"step {step}: {record['failed']:.0f} groups were dropped because an answer could not be had")
    return found
