"""Looks at the built site in a headless browser, on a telephone's width and on a desk's.

    python scripts/site_check.py [SITE]    # default: build/site; exit 1 says what is wrong

Each page must raise no script error, lack no file, and be no wider than its window. No code is cut,
no table is wider than its column, no list is part of a paragraph. The home page's first picture is
on its first screen. Links and anchors inside the site must lead somewhere. No private name is
documented. At most 20 pages. Needs chromium, nothing else.
"""

from __future__ import annotations

import http.server
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

WIDTHS = (390, 1280)
LIMIT_S = 240.0
MOST_PAGES = 20
# before all scripts of a page: what goes wrong there is told to the page around it
WATCH = """<script>addEventListener("error", e => parent.postMessage(
  e.message || "cannot load " + (e.target.src || e.target.href), "*"), true)</script>"""
AROUND = """<!doctype html><iframe id="f" height="900"></iframe><script>
const pages = %s, widths = %s, found = [], frame = document.getElementById("f");
let at = "";
addEventListener("message", e => {
  if (typeof e.data === "string") found.push(at + ": " + e.data)
});
(async () => {
  for (const page of pages) for (const width of widths) {
    at = page + " at " + width;
    frame.style.width = width + "px"; frame.style.border = 0;
    await new Promise(done => { frame.onload = done; frame.src = "/" + page });
    await new Promise(done => setTimeout(done, 30));
    const root = frame.contentDocument.documentElement;
    if (root.scrollWidth > width) {
      const wide = [...root.querySelectorAll("article *")]
        .filter(x => x.getBoundingClientRect().right > width + 1)
        .map(x => x.tagName.toLowerCase() + " " + x.textContent.trim().slice(0, 50));
      found.push(at + ": it is " + root.scrollWidth + " wide: " + (wide[wide.length - 1] || ""));
    }
    const report = (selector, is_wrong, words) => {
      for (const x of root.querySelectorAll("article " + selector))
        if (is_wrong(x)) {
          const text = x.textContent.trim().replace(/\\s+/g, " ");
          found.push(at + ": " + words + ": " + text.slice(0, 60));
        }
    };
    report("pre > code", x => x.scrollWidth > x.clientWidth + 1, "code is cut");
    const column = root.querySelector("article").clientWidth;
    report("table", x => Math.max(x.scrollWidth, x.offsetWidth) > column + 1, "a wide table");
    const picture = page === "index.html" ? root.querySelector("article img") : null;
    if (picture && picture.getBoundingClientRect().bottom > 800)
      found.push(at + ": the first picture is not on the first screen");
    report("p", x => /\\n\\s*([-*]|\\d+\\.) /.test(x.textContent), "a list in a paragraph");
  }
  fetch("/", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""


class Server(http.server.SimpleHTTPRequestHandler):
    """The site's files, pages with `WATCH` in them; takes what the browser has found."""

    pages: tuple[str, ...] = ()
    found: list[str] | None = None
    told = threading.Event()

    def do_GET(self) -> None:
        path = Path(self.directory) / unquote(urldefrag(self.path)[0]).lstrip("/")
        if self.path == "/around":
            text = AROUND % (json.dumps(self.pages), json.dumps(WIDTHS))
        elif path.suffix == ".html" and path.exists():
            text = path.read_text(encoding="utf-8").replace("<head>", "<head>" + WATCH, 1)
        else:
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(text.encode())
        return None

    def do_POST(self) -> None:
        Server.found = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        self.told.set()

    def log_message(self, *_: Any) -> None:
        pass


class Page(HTMLParser):
    """A page's links, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links, self.anchors = set[str](), {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.links.add(value)
            if name == "id" or (name == "name" and tag == "a"):
                self.anchors.add(value or "")


def broken_links(site: Path) -> list[str]:
    """Links and anchors inside the site that lead nowhere, and anchors of private names."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    anchors = {anchor for page in pages.values() for anchor in page.anchors}
    found = [f"{anchor} is private" for anchor in sorted(anchors) if "._" in anchor]
    for path, page in pages.items():
        for link in sorted(page.links):
            if "//" in link or link.startswith(("mailto:", "data:")) or path.name == "404.html":
                continue
            name, anchor = urldefrag(link)
            to = (path.parent / unquote(name)).resolve() if name else path
            to = to / "index.html" if to.is_dir() else to
            if not to.exists() or (to in pages and unquote(anchor) not in pages[to].anchors):
                found.append(f"{path.relative_to(site.resolve())}: {link} leads nowhere")
    return found


def seen(site: Path) -> list[str]:
    """Return the problems that a browser finds in the pages."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("chromium is missing (on Debian: the package chromium)")
    Server.pages = tuple(sorted(str(path.relative_to(site)) for path in site.rglob("index.html")))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        around = f"http://127.0.0.1:{server.server_port}/around"
        browser = subprocess.Popen(
            [chromium, *options, "--remote-debugging-port=0", around], stderr=subprocess.DEVNULL
        )
        try:
            Server.told.wait(LIMIT_S)
        finally:
            browser.terminate()
            browser.wait()
            server.shutdown()
    return ["the browser has not come to an end"] if Server.found is None else Server.found


def main() -> None:
    site = Path(sys.argv[1] if len(sys.argv) > 1 else "build/site")
    wrong = broken_links(site) + seen(site)
    if len(Server.pages) > MOST_PAGES:
        wrong.append(f"{len(Server.pages)} pages, more than {MOST_PAGES}")
    if wrong:
        raise SystemExit("\n".join(wrong))
    print(f"{site}: {len(Server.pages)} pages seen {WIDTHS} pixels wide, no link is broken")


if __name__ == "__main__":
    main()
