"""The leaderboard as one HTML file that needs nothing else: no network, no server, no library.

    cells = read_cells(["runs/paper"])
    write_page(cells, "leaderboard.html")

Table, averages, pictures, every cell's configuration and the items that flipped, in one
page of text, style and script of our own (``page.html``, ``page.css``, ``page.js``) under
a content security policy that lets nothing else run. The same cells give the same bytes.
"""

from kvacc.page.build import build_page, write_page

__all__ = ["build_page", "write_page"]
