"""The style sheet of pages: neutral, light or dark as the reader's system says."""

STYLE = """
:root { color-scheme: light dark; --bg: #fbfbfa; --card: #ffffff; --ink: #1d2126; --quiet: #646b74; --rule: #dfe2e6;
  --c1: #2f6fb0; --c2: #c2571a; --c3: #7a7f87; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171a; --card: #1b1f24; --ink: #e4e7ea; --quiet: #98a1ab; --rule: #333a42;
  --c1: #6aa9e6; --c2: #f0935a; --c3: #9aa1aa; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
header, main { max-width: 940px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 36px; }
h1 { font-size: 26px; margin: 0; } h2 { font-size: 18px; margin: 0 0 14px; } h3 { font-size: 15px; margin: 22px 0 8px; }
nav { margin: 12px 0 4px; font-size: 14px; } nav a { color: var(--c1); text-decoration: none; margin-right: 16px; white-space: nowrap; }
nav a:hover { text-decoration: underline; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 20px 24px; margin: 18px 0; }
.quiet { color: var(--quiet); font-size: 13.5px; margin: 6px 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin: 18px 0; }
.cards div { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 14px 16px; }
.cards b { display: block; font-size: 20px; font-variant-numeric: tabular-nums; }
.cards span { color: var(--quiet); font-size: 13px; }
.cards div:first-child { grid-column: span 2; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 10px; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--quiet); font-weight: 500; font-size: 13px; vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal; min-width: 118px; }
tr.rule td { border-top: 2px solid var(--quiet); }
tbody tr:last-child td { border-bottom: none; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 6px 0; font-size: 14px; }
dt { color: var(--quiet); } dd { margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
pre { background: var(--bg); border: 1px solid var(--rule); border-radius: 6px; padding: 12px 14px; overflow-x: auto; font-size: 13px; }
summary { cursor: pointer; color: var(--c1); margin-top: 12px; }
.legend { font-size: 13px; color: var(--quiet); margin: 4px 0 8px; }
.key { margin-right: 20px; white-space: nowrap; } .key i { display: inline-block; width: 22px; margin-right: 7px; vertical-align: middle; }
.scale { display: inline-block; width: 90px; height: 11px; margin: 0 6px; vertical-align: -1px; border: 1px solid var(--rule);
  background: linear-gradient(to right, transparent, var(--c1)); }
.grid3 { display: grid; grid-template-columns: repeat(auto-fit, minmax(260px, 1fr)); gap: 6px 18px; margin-top: 14px; }
figure { margin: 0; }
.maps { display: flex; flex-wrap: wrap; gap: 8px 20px; }
svg { display: block; max-width: 100%; }
svg .label { fill: var(--quiet); font-size: 11.5px; } svg .title { fill: var(--ink); font-size: 12.5px; }
svg .grid { stroke: var(--rule); stroke-width: 1; } svg .axis { stroke: var(--quiet); stroke-width: 1; }
svg .reference { stroke: var(--quiet); stroke-width: 1; stroke-dasharray: 2 4; } svg .leader { stroke: var(--quiet); stroke-width: .8; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .cell { fill: var(--c1); } svg .frame { fill: none; stroke: var(--rule); }
@media print { section { break-inside: avoid; } }
"""
