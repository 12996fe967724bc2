"""The page's style sheet: light and dark as the reader's system asks, one column on a phone."""

STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1c2024;--soft:#5b6570;--line:#d9dee3;--card:#f6f8fa;
--fail:#b42318;--warn:#8a5a00;--info:#0b5d8a;--good:#1a6b3a;
--c0:#1f6feb;--c1:#c2410c;--c2:#15803d;--c3:#9333ea;--c4:#be185d;--c5:#0e7490}
@media(prefers-color-scheme:dark){:root{--back:#14171a;--text:#e3e7eb;--soft:#9aa5b1;--line:#333b43;--card:#1c2126;
--fail:#ff8a80;--warn:#f0b64c;--info:#6cb8ea;--good:#62c98a;
--c0:#6ea8fe;--c1:#ff9b6a;--c2:#63cf8b;--c3:#c79bff;--c4:#ff8fc0;--c5:#5fd0e4}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--text);font:16px/1.5 system-ui,sans-serif}
main{max-width:1320px;margin:0 auto;padding:16px}
h1{font-size:1.35rem;margin:.2em 0;overflow-wrap:anywhere}
h2{font-size:1.05rem;margin:0;display:inline-block}
header p{margin:.3em 0}
.state{font-size:.95rem;font-weight:600;padding:.1em .6em;border:1px solid;border-radius:1em;white-space:nowrap}
.running,.finished{color:var(--good)}.stalled,.died{color:var(--fail)}.ended{color:var(--warn)}
progress{width:100%;height:10px;accent-color:var(--c0)}
dl{display:grid;grid-template-columns:auto 1fr;gap:.15em 1em;margin:.6em 0}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
section,main>details{margin:20px 0}
summary{cursor:pointer;padding:.25em 0}
.alarm{border-left:4px solid var(--line);background:var(--card);border-radius:4px;padding:.35em .8em;margin:.5em 0}
.alarm *{overflow-wrap:anywhere}
.alarm.fail{border-color:var(--fail)}.alarm.warn{border-color:var(--warn)}.alarm.info{border-color:var(--info)}
.tag{font-weight:700;white-space:nowrap}
.fail .tag{color:var(--fail)}.warn .tag{color:var(--warn)}.info .tag{color:var(--info)}
.alarm ul{margin:.3em 0;padding-left:1.2em}.alarm p{margin:.3em 0;color:var(--soft)}
.alarm .fix{color:var(--text)}.fix::before{content:"\\2192\\00a0"}
.quiet,footer{color:var(--soft)}footer{font-size:.85rem;margin-top:2em}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:16px}
figure{margin:0;padding:10px;border:1px solid var(--line);border-radius:6px;min-width:0}
figcaption{font-weight:600;font-size:.95rem}
.legend{display:flex;flex-wrap:wrap;gap:0 1em;font-weight:400;font-size:.85rem;color:var(--soft)}
.legend span{display:inline-flex;align-items:center;gap:.35em;overflow-wrap:anywhere}
.key{width:24px;height:8px;flex:none}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--soft);font-size:12px}
.grid{stroke:var(--line);fill:none}.mark{stroke:var(--soft);fill:none;stroke-dasharray:2 4;opacity:.7}
.line{fill:none;stroke-width:1.8;stroke-linecap:round;stroke-linejoin:round}.bad{stroke:none}
.s0{--c:var(--c0)}.s1{--c:var(--c1)}.s2{--c:var(--c2)}.s3{--c:var(--c3)}.s4{--c:var(--c4)}.s5{--c:var(--c5)}
.line{stroke:var(--c)}.bad{fill:var(--c)}
.line.s1{stroke-dasharray:7 3}.line.s2{stroke-dasharray:2 4}.line.s3{stroke-dasharray:9 3 2 3}
.line.s4{stroke-dasharray:4 4}.line.s5{stroke-dasharray:12 4}
.runs{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:16px}
.run{border-top:4px solid var(--c);padding-top:8px;min-width:0}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:.15em .8em .15em 0;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left}
pre{overflow-x:auto;background:var(--card);padding:10px;font-size:.8rem;max-height:60vh}
"""
