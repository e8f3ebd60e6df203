"""How the report looks. The colours of curves are Okabe and Ito's, which nearly everybody tells apart."""

STYLE = """
:root { --paper: #ffffff; --ink: #1d1f21; --dim: #5b6168; --line: #d5d8dc; --grid: #e8eaed; --card: #f6f7f9;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #aa4499; --c4: #8a6d00; --c5: #56707f; --limit: #b00020; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181b; --ink: #e6e8ea; --dim: #a2a8b0; --line: #3b4047;
  --grid: #292d33; --card: #1f2226; --c0: #56b4e9; --c1: #f0934e; --c2: #3fc79a; --c3: #d98cc6; --c4: #e0c341;
  --c5: #9fb6c3; --limit: #ff7b8a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 24px; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 12px; }
h3 { font-size: 14px; font-weight: 600; margin: 0 0 8px; overflow-wrap: anywhere; }
header p, .unit, .legend { color: var(--dim); }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 16px 0 0; }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 8px 14px; }
.tiles dt { color: var(--dim); font-size: 12px; }
.tiles dd { font-size: 19px; margin: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); gap: 16px; }
figure, article { background: var(--card); border: 1px solid var(--line); border-radius: 8px; margin: 0;
  padding: 12px; }
article { margin-bottom: 12px; }
figcaption { font-weight: 600; }
.unit { font-weight: 400; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--dim); font-size: 12px; }
.grid { stroke: var(--grid); fill: none; }
.axis { stroke: var(--line); fill: none; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.band { stroke: none; opacity: 0.18; }
.limit { fill: none; stroke: var(--limit); stroke-width: 1.5; stroke-dasharray: 5 3; }
.mark { stroke: var(--limit); stroke-width: 1; opacity: 0.6; fill: none; }
.line.c0 { stroke: var(--c0); } .band.c0, .dot.c0 { fill: var(--c0); }
.line.c1 { stroke: var(--c1); } .band.c1, .dot.c1 { fill: var(--c1); }
.line.c2 { stroke: var(--c2); } .band.c2, .dot.c2 { fill: var(--c2); }
.line.c3 { stroke: var(--c3); } .band.c3, .dot.c3 { fill: var(--c3); }
.line.c4 { stroke: var(--c4); } .band.c4, .dot.c4 { fill: var(--c4); }
.line.c5 { stroke: var(--c5); } .band.c5, .dot.c5 { fill: var(--c5); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 6px 0 0; font-size: 13px; }
.legend b { color: var(--ink); font-weight: 600; }
.key { display: inline-block; width: 30px; margin-right: 6px; vertical-align: middle; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; margin-bottom: 16px; }
caption { text-align: left; color: var(--dim); padding: 4px 0; }
th, td { text-align: left; padding: 3px 12px 3px 0; border-bottom: 1px solid var(--grid); vertical-align: top;
  overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
td:not(:last-child) { white-space: nowrap; }
td:last-child { min-width: 12em; }
.texts dt { color: var(--dim); font-size: 12px; }
.texts dd { margin: 0 0 6px; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }
@media print { body { max-width: none; } figure, article { break-inside: avoid; } }
"""
