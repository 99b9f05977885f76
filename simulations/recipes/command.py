"""The `fedsign reproduce` command: options and printed results."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from simulations.options import JsonOption, stoppable
from simulations.output import current
from simulations.printing import escaped, print_json, print_table


def reproduce(
    name: Annotated[str, typer.Argument(metavar="RECIPE", help="Recipe name (see --list).")] = "",
    list_all: Annotated[bool, typer.Option("--list", help="List the recipes.")] = False,
    data: Annotated[
        str,
        typer.Option(
            "--data",
            metavar="DATA",
            help="Data set name (see --list), folder with one subfolder per class, or .npz file.",
        ),
    ] = "",
    data_root: Annotated[
        str, typer.Option("--data-root", metavar="DIR", help="Folder with the data set's files.")
    ] = "",
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="Replace the recipe's model.")] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer seeds and rounds: a smoke test, without a verdict on the claim.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Check a claim: run its experiments, and compare the metrics with thresholds fixed in advance."""
    from simulations.recipes import table as recipes
    from simulations.recipes.kept import keeping
    from simulations.recipes.where import AT_HOME, cost

    if list_all or not name:
        rows = [
            {
                "name": key,
                "source": each.source or "this program",
                "data": ", ".join(each.data) or (each.home if each.budget else "its own"),
                "measured": recipes.get(key).expected or "not yet",
                "claim": each.claim,
            }
            for key, each in recipes.all_recipes().items()
        ]
        print_json(rows) if json else print_table(rows)
        return
    recipe = recipes.get(name, data=data, root=data_root, model=model)
    folder = Path("reproductions") / (recipe.name.replace(" ", "-").replace("/", "") + "-quick" * quick)
    with stoppable("finished trainings"):
        if recipe.budget is not None and recipe.expected is None and recipe.where is not AT_HOME:
            sentence = f"nobody has measured {recipe.name}: {cost(recipe.budget(quick, recipe.where))}."
            if current().detail != "quiet":
                current().print(sentence)
        with keeping(folder):
            finding = recipe.check(quick=quick)
    if json:
        print_json(finding.as_json())
    else:
        print_finding(finding)
    if not finding.as_expected:
        raise typer.Exit(1)


def print_finding(finding: Any) -> None:
    """Print a recipe's claim, metrics and verdict; if the claim holds in part, also which parts do."""
    from simulations.recipes.base import Verdict

    console, recipe = Console(soft_wrap=True, highlight=False), finding.recipe
    console.print(f"[bold]{recipe.name}[/]: {escaped(recipe.claim)}")
    if finding.metrics:
        print_table(finding.rows())
    found = finding.as_json()
    for key in ("reason", "page"):
        if found[key]:
            console.print(f"{key}: {escaped(found[key])}")
    for each in found["parts"]:
        console.print(f"{'holds' if each['holds'] else 'does not hold'}: {escaped(each['says'])}")
    expected = "as expected" if finding.as_expected else f"expected was: {finding.expected or 'a verdict'}"
    if finding.expected is None and finding.as_expected:
        expected = "not measured before"
    verdict = f"depends on {recipe.open_constant}" if finding.verdict is Verdict.DEPENDS else finding.verdict
    console.print(f"verdict: [bold]{verdict}[/] ({expected})")
