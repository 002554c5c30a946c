"""Verdicts on what is configured: the four sources, the model, the port. Pure; reads nothing."""

from __future__ import annotations

from kvrelay.doctor.finding import Finding, Verdict


def judge_config(path: str, variables: int, error: str, field: str) -> Finding:
    """path: the file, "" for none; variables: how many KVRELAY_* are set; error: of loading all of it, "" for none."""
    sources = [path or "no file", f"{variables} KVRELAY_* variables"]
    figures = {"path": path, "variables": variables, "field": field}
    if error:
        where = "in the file" if path and not field.startswith(("KVRELAY_", "--")) else "in the environment"
        return Finding("config", Verdict.PROBLEM, error, f"correct {field or 'it'} {where}", figures)
    return Finding("config", Verdict.OK, ", ".join(sources), figures=figures)


def judge_model(model: str, executor: str, directory: str, error: str) -> Finding:
    """directory: where it lies, error: why it cannot be served; both "" if the executor needs none."""
    figures = {"model": model, "directory": directory}
    if executor != "torch":
        return Finding("model", Verdict.OK, f"none needed by the {executor} executor", figures=figures)
    if error:
        advice = "" if "kvrelay models pull" in error else "kvrelay models list shows what can be pulled"
        return Finding("model", Verdict.PROBLEM, error, advice, figures)
    return Finding("model", Verdict.OK, f"{model} in {directory}", figures=figures)


def judge_port(address: str, taken: str, coordinator: bool) -> Finding:
    """taken: why nothing can listen there, "" if it can. coordinator: one of ours answers there."""
    figures = {"address": address, "free": not taken}
    if not taken:
        return Finding("port", Verdict.OK, f"{address} is free", figures=figures)
    if coordinator:
        return Finding("port", Verdict.OK, f"a coordinator serves on {address}", figures=figures)
    advice = "end what listens there, or choose another: --listen HOST:PORT"
    return Finding("port", Verdict.PROBLEM, f"{taken}, and no coordinator answers there", advice, figures)
