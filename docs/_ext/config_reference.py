"""Sphinx extension: the reference of a Hydra config group, generated at build time.

    ```{config-group} model
    ```

lists the options of the group with the comments at the top of their files, and a table of
parameters with their values in each option.
"""

from config_tables import group_reference
from sphinx.util.docutils import SphinxDirective


class ConfigGroup(SphinxDirective):
    """`config-group`: the reference of one group."""

    required_arguments = 1

    def run(self):
        """Replace the directive by the generated Markdown."""
        return self.parse_text_to_nodes(group_reference(self.arguments[0]))


def setup(app):
    """Register the directive; the files are read at every build."""
    app.add_directive("config-group", ConfigGroup)
    return {"parallel_read_safe": True}
