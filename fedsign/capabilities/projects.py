"""Projects: a folder with an experiment of one's own, which is a Flower app, too."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="`fedsign new`: a folder with a strategy and a data set of your own, which `flwr run` accepts, too",
    modules=("simulations.projects",),
    commands={
        "new": "simulations.projects.command:new",
    },
    files=("docs/how-to/start-a-project.md",),
)
