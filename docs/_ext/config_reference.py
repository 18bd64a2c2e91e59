"""Sphinx extension: the reference of a Hydra config group, made when the documentation is built.

    ```{config-group} model
    ```

lists the choices of the group with the comments that head their files, and every option with its meaning and its value in
each choice.
"""

from config_tables import group_reference
from sphinx.util.docutils import SphinxDirective


class ConfigGroup(SphinxDirective):
    """`config-group`: the reference of one group."""

    required_arguments = 1

    def run(self):
        """Parse the generated Markdown in place of the directive."""
        return self.parse_text_to_nodes(group_reference(self.arguments[0]))


def setup(app):
    """Register the directive; every build reads the files anew."""
    app.add_directive("config-group", ConfigGroup)
    return {"parallel_read_safe": True}
