"use strict";
// Draws a chart with uPlot: hover, legend, zoom. Its JSON is made by plots.py; on a page it stands in the .plot.
function drawChart(plot, chart) {
  const figure = plot.closest("figure");
  const keys = [...figure.querySelectorAll(".key")];
  const readout = figure.querySelector("output");
  const color = (name) => getComputedStyle(figure).getPropertyValue(name).trim();
  const isWhole = chart.x.values.flat().every(Number.isInteger);

  const minus = (number) => number.replaceAll("-", "\u2212");
  const text = (value) => {
    if (value == null) return "–";
    if (chart.y.percent) return minus(`${(100 * value).toFixed(1)}\u202f%`);
    const size = Math.abs(value);
    if (size >= 1e6 || (size > 0 && size < 1e-4)) return minus(value.toExponential(1));
    return minus(size < 100 && size > 0 ? value.toPrecision(3) : Math.round(value).toLocaleString("en-US"));
  };

  // uPlot wants one column of x: those of all series together
  const tables = [], series = [{}], bands = [], lines = keys.map(() => []), all = keys.map(() => []);
  const add = (key, x, values, options) => {
    tables.push([chart.x.values[x], values]);
    all[key].push(series.length);
    return series.push({spanGaps: false, points: {show: false}, ...options}) - 1;
  };
  for (const each of chart.series) {
    const stroke = () => color(`--c${each.color}`);
    if (each.low) {
      const ends = [each.high, each.low].map((values) => add(each.key, each.x, values, {width: 0}));
      bands.push({series: ends, fill: () => `color-mix(in srgb, ${stroke()} 14%, transparent)`});
    }
    const isSingle = each.y.filter((value) => value != null).length === 1;
    const column = add(each.key, each.x, each.y, {
      stroke, dash: each.dash, width: each.faint ? 1.25 : 2.25, alpha: each.faint ? 0.4 : 1, points: {show: isSingle},
    });
    const hasOther = chart.series.some((other) => other.key === each.key && !other.faint);
    if (!each.faint || !hasOther) lines[each.key].push(column);  // whose values the legend shows
  }
  const data = uPlot.join(tables);

  const nearest = (column, index) => {  // series need not have a value at each x of the others
    for (let away = 0; away < data[0].length; away++)
      for (const at of [index - away, index + away]) if (data[column][at] != null) return at;
    return index;
  };
  const atFirst = keys.map((key) => key.querySelector("b").textContent);  // the last values
  const show = (index) => {
    // of "λ (in units of ...)" only the name: a longer readout would cover the legend
    readout.textContent = index == null ? "" : `${chart.x.label.replace(/[ ,].*/, "")} ${minus(data[0][index].toLocaleString("en-US"))}`;
    keys.forEach((key, i) => {
      const values = lines[i].map((column) => data[column][nearest(column, index ?? 0)])
        .filter((value) => value != null).sort((a, b) => a - b);
      key.querySelector("b").textContent = index == null ? atFirst[i] : [...new Set([values[0], values.at(-1)].map(text))].join(" – ");
    });
  };

  const font = () => `12px ${getComputedStyle(document.body).fontFamily}`;
  const axis = {stroke: () => color("--soft"), font: font(), ticks: {show: false}};
  const ticks = (_, values) => values.map((value) => value == null ? "" : minus(
    chart.y.percent ? `${+(100 * value).toFixed(6)}\u202f%` : chart.y.log ? String(value) :
    value.toLocaleString("en-US", {notation: "compact", maximumFractionDigits: 10})));
  const size = () => ({width: plot.clientWidth, height: plot.clientHeight});
  const isAll = (u) => (u.scales.x.min ?? -Infinity) <= chart.x.limits[0] && (u.scales.x.max ?? Infinity) >= chart.x.limits[1];
  const u = new uPlot({
    ...size(),
    legend: {show: false},
    cursor: {y: false, points: {size: 7}, dataIdx: (_, column, index) => nearest(column, index)},
    scales: {
      x: {time: false, distr: chart.x.log ? 3 : 1, range: (_, low, high) => low == null || low === high ? chart.x.limits : [low, high]},
      y: {distr: chart.y.log ? 3 : 1, range: (u, low, high) =>
        low == null || isAll(u) ? chart.y.limits : (chart.y.log ? uPlot.rangeLog : uPlot.rangeNum)(low, high, chart.y.log ? 10 : 0.1, true)},
    },
    axes: [
      {...axis, label: chart.x.label, labelFont: font(), labelSize: 20, size: 26, grid: {show: false},
        values: (_, values) => values.map((value) => value == null || isWhole && !Number.isInteger(value) ? "" : minus(value.toLocaleString("en-US", Math.abs(value) < 1e6 ? {} : {notation: "compact"})))},
      {...axis, values: ticks,
        grid: {stroke: () => color("--grid"), width: 1, filter: (_, values) => chart.y.log ?
          values.map((value) => Number.isInteger(+Math.log10(value).toFixed(9)) ? value : null) : values},
        size: (_, values) => 14 + 7 * Math.max(0, ...(values ?? []).map((value) => value.length))},
    ],
    series, bands,
    hooks: {
      setCursor: [(u) => show(u.cursor.idx)],
      drawAxes: [({ctx, bbox, valToPos}) => chart.rules.forEach((at) => {
        ctx.fillStyle = color("--soft");
        ctx.fillRect(valToPos(at, "x", true), bbox.top, 1, bbox.height);
      })],
    },
  }, data, plot);
  plot.classList.add("is-live");
  const resized = new ResizeObserver(() => u.setSize(size()));
  resized.observe(plot);
  const scheme = matchMedia("(prefers-color-scheme: dark)"), redraw = () => u.redraw();
  scheme.addEventListener("change", redraw);
  u.hooks.destroy = [() => { resized.disconnect(); scheme.removeEventListener("change", redraw); }];

  keys.forEach((key, i) => {
    key.disabled = false;
    key.addEventListener("click", () => {
      const isOn = key.getAttribute("aria-pressed") === "false";
      key.setAttribute("aria-pressed", isOn);
      all[i].forEach((column) => u.setSeries(column, {show: isOn}));
    });
  });

  // keys do what the mouse does: arrows point, + and - zoom, Escape shows all
  let at = data[0].length - 1;
  plot.tabIndex = 0;
  plot.setAttribute("role", "application");
  plot.addEventListener("keydown", (event) => {
    const [low, high] = [u.scales.x.min, u.scales.x.max], middle = data[0][at];
    const zoom = (factor) => u.setScale("x", {
      min: Math.max(chart.x.limits[0], middle - factor * (middle - low)), max: Math.min(chart.x.limits[1], middle + factor * (high - middle))});
    const action = {
      ArrowLeft: () => at--, ArrowRight: () => at++, Home: () => at = 0, End: () => at = data[0].length - 1,
      "+": () => zoom(0.5), "-": () => zoom(2), Escape: () => u.setScale("x", {min: chart.x.limits[0], max: chart.x.limits[1]}),
    }[event.key];
    if (!action) return;
    event.preventDefault();
    action();
    at = Math.min(Math.max(at, 0), data[0].length - 1);
    u.setCursor({left: u.valToPos(data[0][at], "x"), top: 0});
    readout.setAttribute("aria-label", `${readout.textContent}: ${keys.map((key) => key.textContent.trim()).join(", ")}`);
  });
  return u;
}
for (const plot of document.querySelectorAll(".plot")) drawChart(plot, JSON.parse(plot.querySelector("script").textContent));
