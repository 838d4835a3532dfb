"""`runahead capabilities`: the table of supported combinations."""

from services.scheduler.capabilities import BACKENDS, POLICIES, table


def show() -> None:
    """Print the features, and the reason of each refusal."""
    rows = list(table())
    refused = dict.fromkeys(reason for _, reason in rows if reason)
    print(f"Batching policies ({', '.join(POLICIES)}), stages, run-ahead, backends ({', '.join(BACKENDS)}), drafts and")
    print(f"structured output have {len(rows)} combinations. These are refused:")
    print("\n".join(f"- {reason}" for reason in refused))
