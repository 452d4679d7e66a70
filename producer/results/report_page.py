"""A run report as a static page. Names and reasons come from elsewhere: all of it is escaped."""

from collections.abc import Sequence

from svdq.producer.results import pages
from svdq.producer.results.pages import text
from svdq.producer.results.run_report import LEFT, RunReport


def report_page(report: RunReport) -> str:
    """Make the page."""
    numbers = [
        (str(report.count("finished")), "finished"),
        (str(report.count("failed")), "failed"),
        (str(report.count("stopped")), "stopped"),
        (str(report.count("canceled")), "canceled"),
        ("-" if report.videos_per_hour is None else f"{report.videos_per_hour:.1f}", "videos an hour"),
        ("-" if report.busy_share is None else f"{report.busy_share:.0%}", "of the ranks' time used"),
        *((str(report.left.get(state, 0)), f"left {state}") for state in LEFT),
    ]
    tables = [
        _table(
            "Failed",
            ("name", "job", "reason"),
            [(job.name, job.id, reason) for reason, jobs in report.reasons for job in jobs],
        ),
        _table(
            "All jobs that ended",
            ("ended", "name", "job", "state"),
            [(f"{job.ended_at.astimezone():%Y-%m-%d %H:%M:%S}", job.name, job.id, job.status) for job in report.jobs],
        ),
    ]
    return pages.fill_page(
        "report.html",
        title=text(f"svdq, {report.stretch}"),
        ending=text(report.ending),
        numbers="\n".join(f"<li><strong>{text(number)}</strong>{text(word)}</li>" for number, word in numbers),
        tables="\n".join(tables),
    )


def _table(caption: str, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Make a table; "" without rows."""
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{text(title)}</th>' for title in titles)
    body = "\n".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><caption>{text(caption)}</caption><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
