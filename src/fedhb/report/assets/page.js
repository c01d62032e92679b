// Draws the plots of the page from its data. All plots are drawn again when the reader shows or hides a method, or switches
// between light and dark.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const shown = new Set(data.methods.map((method) => method.name));
  const charts = new Map();
  const chosen = new Map();
  let horizontal = "round";

  // ---- colours of the page, light or dark
  const wants = window.matchMedia("(prefers-color-scheme: dark)");
  let theme = null;
  const button = document.getElementById("theme");
  const applyTheme = () => {
    const now = theme || (wants.matches ? "dark" : "light");
    root.dataset.theme = now;
    button.textContent = now === "dark" ? "Light" : "Dark";
    drawAll();
  };
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // ---- numbers
  const text = (value, percent) => {
    if (value === null || value === undefined) return "–";
    if (percent) return `${(100 * value).toFixed(1)} %`;
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
    return size >= 1000 ? Math.round(value).toLocaleString("en").replaceAll(",", " ") : String(Number(value.toPrecision(4)));
  };
  const safe = (value) => String(value).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
  // Math.min(...values) would fail: a call takes some 100,000 arguments at most.
  const extent = (values) => values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
  const methodOf = (name) => data.methods.find((method) => name === method.name || name.startsWith(`${method.name}, seed`));
  const visible = (series) => { const method = methodOf(series.name); return !method || shown.has(method.name); };

  // ---- options that all plots share
  const base = (plot, phone) => {
    const ink = css("--ink"), soft = css("--soft"), line = css("--line");
    const label = { color: soft, fontSize: 12 };
    const axis = (about, more) => ({
      name: about.label, nameTextStyle: { color: soft, fontSize: 12 }, axisLabel: label, axisLine: { lineStyle: { color: line } },
      axisTick: { lineStyle: { color: line } }, splitLine: { lineStyle: { color: line, opacity: 0.6 } }, ...more,
    });
    const option = {
      animation: false,
      textStyle: { fontFamily: getComputedStyle(document.body).fontFamily, color: ink },
      grid: { left: 12, right: 28, top: 40, bottom: 34, containLabel: true },
      tooltip: {
        confine: true, backgroundColor: css("--raised"), borderColor: line, textStyle: { color: ink, fontSize: 13 }, className: "tip",
        extraCssText: "max-height:60vh;overflow:auto",
      },
    };
    return { option, axis, ink, soft, line };
  };
  const legend = (soft, names) => ({
    type: "scroll", top: 0, left: 0, right: 0, icon: "roundRect", itemWidth: 14, itemHeight: 8, textStyle: { color: soft, fontSize: 12 },
    pageTextStyle: { color: soft }, pageIconColor: soft, data: names, selectedMode: false,
  });
  const table = (head, rows) => `<table><thead><tr>${head.map((h) => `<th scope="col">${safe(h)}</th>`).join("")}</tr></thead><tbody>` +
    rows.map((row) => `<tr>${row.map((cell) => `<td>${safe(cell)}</td>`).join("")}</tr>`).join("") + "</tbody></table>";
  const row = (colour, name, value) => `<div><span class="dot" style="background:${colour}"></span>${safe(name)}: <b>${safe(value)}</b></div>`;
  const xs = (plot, series) => (plot.x_choices ? series.x[horizontal] : series.x);
  const longestX = (series) => series.reduce((longest, bar) => (bar.x.length > longest.length ? bar.x : longest), []);

  // Move the names at the ends of lines apart where lines end close together; axes are some 240 pixels high.
  const spreadLabels = (series, log) => {
    const scale = (y) => (log ? Math.log(y) : y);
    const all = series.flatMap((line) => line.data.map(([, y]) => y)).filter((y) => y !== null && (!log || y > 0)).map(scale);
    const [low, high] = extent(all);
    const named = series.filter((line) => line.endLabel && line.endLabel.show && line.data.length).map((line) => {
      const last = line.data.filter(([, y]) => y !== null).at(-1)[1];
      return { line, at: 240 * (high - scale(last)) / (high - low || 1) };
    }).sort((a, b) => a.at - b.at);
    let previous = -1e9;
    for (const { line, at } of named) {
      const moved = Math.max(at, previous + 15);
      line.endLabel.offset = [0, moved - at];
      previous = moved;
    }
  };

  // ---- the kinds of plots: each function returns the options of a chart
  const kinds = {
    lines(plot, phone) {
      const { option, axis, soft, line } = base(plot, phone);
      const lines = plot.series.filter(visible);
      const xLabel = plot.x_choices ? plot.x_choices[horizontal] : plot.x.label;
      const series = [];
      const endLabels = !phone && lines.filter((curve) => !curve.faint).length <= 6 && !plot.diagonal && !plot.plain_ends;
      for (const curve of lines) {
        const x = xs(plot, curve);
        const points = curve.y.map((y, k) => [x[k], y]);
        if (curve.spread) {
          const low = curve.y.map((y, k) => [x[k], y === null ? null : y - (curve.spread[k] || 0)]);
          const width = curve.y.map((y, k) => [x[k], y === null ? null : 2 * (curve.spread[k] || 0)]);
          if (!plot.y.log) for (const [band, opacity] of [[low, 0], [width, 0.16]]) {
            series.push({
              type: "line", name: `${curve.name} ±`, data: band, stack: `band ${curve.name}`, stackStrategy: "all", symbol: "none",
              silent: true, lineStyle: { opacity: 0 }, areaStyle: { color: curve.colour, opacity }, tooltip: { show: false }, z: 1,
            });
          }
        }
        series.push({
          type: "line", name: curve.name, data: points, color: curve.colour,
          symbol: curve.y.length > 30 || curve.faint ? "none" : "circle", symbolSize: 6, showSymbol: curve.y.length <= 30,
          lineStyle: { width: curve.faint ? 1 : 2.2, opacity: curve.faint ? 0.35 : 1, type: curve.dash || "solid" },
          emphasis: { disabled: true }, z: curve.faint ? 2 : 3,
          endLabel: { show: endLabels && !curve.faint, formatter: () => curve.name, color: curve.colour, fontSize: 12,
            fontWeight: 600, distance: 6 },
        });
      }
      if (plot.diagonal) series.push({
        type: "line", name: "diagonal", data: [[0, 0], [1, 1]], symbol: "none", silent: true, lineStyle: { color: soft, type: "dashed", width: 1 },
        tooltip: { show: false }, z: 1,
      });
      if (!phone) spreadLabels(series, plot.y.log);
      const names = lines.filter((curve) => !curve.faint).map((curve) => curve.name);
      const ends = series.some((curve) => curve.endLabel && curve.endLabel.show);
      const widest = Math.max(0, ...names.map((name) => name.length));
      const unit = (percent) => ({ ...{}, formatter: (v) => (percent ? `${Math.round(100 * v)} %` : text(v)), color: soft, fontSize: 12 });
      option.grid.right = ends ? Math.min(190, 24 + 7.2 * widest) : option.grid.right;
      return {
        ...option, series, legend: legend(soft, names.map((name) => ({ name }))),
        xAxis: axis({ label: xLabel }, { type: plot.x.log ? "log" : "value", nameLocation: "middle", nameGap: 28, axisLabel: unit(plot.x_percent),
          min: plot.diagonal ? 0 : plot.x_percent ? 0 : "dataMin", max: plot.diagonal ? 1 : "dataMax", splitLine: { show: false } }),
        yAxis: axis(plot.y, { type: plot.y.log ? "log" : "value", scale: !plot.diagonal, axisLabel: unit(plot.y.percent),
          nameTextStyle: { color: soft, fontSize: 12, align: "left" }, nameLocation: "end", nameGap: 10,
          max: plot.diagonal ? 1 : plot.y.percent ? (values) => (values.max > 0.9 ? 1 : null) : null, min: plot.diagonal ? 0 : null,
          name: "" }),
        dataZoom: [{ type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false }],
        tooltip: { ...option.tooltip, trigger: "axis", axisPointer: { type: "line", lineStyle: { color: line } },
          formatter: (points) => {
            const rows = points.filter((f) => names.includes(f.seriesName));
            if (!rows.length) return "";
            const at = plot.x_percent ? text(rows[0].value[0], true) : text(rows[0].value[0]);
            return `<div>${safe(xLabel)} ${at}</div>` + rows.map((f) => row(f.color, f.seriesName, text(f.value[1], plot.y.percent))).join("");
          } },
      };
    },
    bars(plot, phone) {
      const { option, axis, soft } = base(plot, phone);
      const bars = plot.series.filter(visible);
      const count = Math.max(0, ...bars.map((bar) => bar.x.length));
      const unit = { formatter: (v) => (plot.y.percent ? `${Math.round(100 * v)} %` : text(v)), color: soft, fontSize: 12 };
      return {
        ...option, legend: legend(soft, bars.map((bar) => ({ name: bar.name }))),
        series: bars.map((bar) => ({
          type: plot.y.log ? "scatter" : "bar", symbolSize: 13, name: bar.name, data: bar.y, color: bar.colour, barGap: "0%",
          barCategoryGap: plot.touching ? "8%" : count > 40 ? "10%" : "28%", itemStyle: { opacity: 0.92 },
          emphasis: { disabled: true },
        })),
        xAxis: axis(plot.x, { type: "category", data: longestX(bars).map(String), nameLocation: "middle", nameGap: 30,
          axisLabel: { color: soft, fontSize: 11, hideOverlap: true, interval: count > 24 ? "auto" : null, width: 120,
            overflow: "truncate" } }),
        yAxis: axis(plot.y, { type: plot.y.log ? "log" : "value", axisLabel: unit, name: "" }),
        dataZoom: count > 24 ? [{ type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false }] : [],
        tooltip: { ...option.tooltip, trigger: "axis", axisPointer: { type: "shadow" },
          formatter: (points) => `<div>${safe(plot.x.label)} ${safe(points[0].axisValue)}</div>` +
            points.map((f) => row(f.color, f.seriesName, text(f.value, plot.y.percent))).join("") },
      };
    },
    heat(plot, phone, width) {
      const { option, axis, soft, ink } = base(plot, phone);
      const cells = [];
      let most = plot.most || 0;
      plot.values.forEach((values, r) => values.forEach((value, c) => {
        if (value !== null) { cells.push([c, r, value]); most = Math.max(most, value); }
      }));
      const few = plot.columns.length * plot.rows.length <= 150 && (width - 130) / plot.columns.length >= 36;
      const share = (value) => (plot.most === 1 ? `${Math.round(100 * value)} %` : text(value));
      return {
        ...option, grid: { ...option.grid, top: 8, bottom: 74 },
        series: [{ type: "heatmap", name: plot.title, data: cells, progressive: 0, itemStyle: { borderColor: css("--ground"), borderWidth: plot.columns.length > 60 ? 0.5 : 1 },
          label: { show: few, formatter: (f) => share(f.value[2]), fontSize: 11 }, emphasis: { itemStyle: { borderColor: ink, borderWidth: 1.5 } } }],
        xAxis: axis({ label: plot.labels[1] }, { type: "category", data: plot.columns, nameLocation: "middle", nameGap: 28, splitLine: { show: false },
          axisLabel: { color: soft, fontSize: 11, hideOverlap: true } }),
        yAxis: axis({ label: "" }, { type: "category", data: plot.rows, inverse: true, splitLine: { show: false },
          axisLabel: { color: soft, fontSize: 11, interval: plot.rows.length > 30 ? "auto" : 0 } }),
        visualMap: { min: 0, max: most || 1, calculable: false, orient: "horizontal", left: "center", bottom: 0, itemHeight: 160, itemWidth: 10,
          text: [`${plot.most === 1 ? "100 %" : text(most)} ${plot.labels[2]}`, "0"], textStyle: { color: soft, fontSize: 12 },
          inRange: { color: [css("--low"), css("--high")] } },
        tooltip: { ...option.tooltip, formatter: (f) => `<div>${safe(plot.labels[1])} ${safe(plot.columns[f.value[0]])}, ${safe(plot.rows[f.value[1]])}</div>` +
          `<b>${text(f.value[2], plot.most === 1)}</b> ${safe(plot.labels[2])}` },
      };
    },
    points(plot, phone) {
      const { option, axis, soft } = base(plot, phone);
      const groups = plot.series.filter(visible);
      const unit = { formatter: (v) => (plot.percent ? `${Math.round(100 * v)} %` : text(v)), color: soft, fontSize: 12 };
      const values = groups.flatMap((group) => group.points.flatMap(([x, y]) => [x, y]));
      const [low, high] = extent(values), room = 0.04 * (high - low || 1);
      const step = plot.percent ? 0.05 : 10 ** Math.floor(Math.log10(high - low || 1)) / 2;
      const round = (v, how) => Number((how((v) / step) * step).toPrecision(6));
      const ends = plot.percent ? [Math.max(0, round(low - room, Math.floor)), 1] : [round(low - room, Math.floor), round(high + room, Math.ceil)];
      const series = groups.map((group) => ({
        type: "scatter", name: group.name, color: group.colour, symbol: group.mark || "circle", symbolSize: group.text ? 20 : 10,
        data: group.points.map(([x, y, label]) => ({ value: [x, y], label_: label })), itemStyle: { opacity: group.text ? 0.85 : 0.7 },
        label: group.text ? { show: true, formatter: group.text, color: "#fff", fontSize: 11, fontWeight: 600 } : { show: false }, emphasis: { scale: 1.3 },
      }));
      if (plot.diagonal) series.push({ type: "line", name: "diagonal", data: [[ends[0], ends[0]], [ends[1], ends[1]]], symbol: "none", silent: true,
        lineStyle: { color: soft, type: "dashed", width: 1 }, tooltip: { show: false } });
      const range = plot.diagonal ? { min: ends[0], max: ends[1] } : { scale: true };
      const hidden = plot.plain ? { axisLabel: { show: false }, axisTick: { show: false } } : { axisLabel: unit };
      return {
        ...option, series, legend: legend(soft, groups.map((group) => ({ name: group.name }))),
        grid: { ...option.grid, bottom: plot.plain ? 26 : 34, left: plot.plain ? 26 : 34 },
        xAxis: axis(plot.x, { type: "value", nameLocation: "middle", nameGap: plot.plain ? 10 : 28, splitLine: { show: !plot.plain, lineStyle: { color: css("--line"), opacity: 0.6 } }, ...range, ...hidden }),
        yAxis: axis(plot.y, { type: "value", nameLocation: "middle", nameGap: plot.plain ? 10 : 46, splitLine: { show: !plot.plain, lineStyle: { color: css("--line"), opacity: 0.6 } }, ...range, ...hidden }),
        dataZoom: [{ type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false, xAxisIndex: 0 }, { type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false, yAxisIndex: 0 }],
        tooltip: { ...option.tooltip, trigger: "item", formatter: (f) => `<div>client ${safe(f.data.label_)}</div>` +
          (plot.plain ? row(f.color, f.seriesName, "").replace(": <b></b>", "") :
            row(f.color, f.seriesName, `${text(f.value[0], plot.percent)} → ${text(f.value[1], plot.percent)}`)) },
      };
    },
  };

  // ---- the same values as tables
  const tables = {
    lines: (plot) => {
      const rows = [];
      for (const line of plot.series.filter(visible)) {
        const x = xs(plot, line);
        line.y.forEach((y, k) => rows.push([line.name, text(x[k], plot.x_percent), text(y, plot.y.percent),
          line.spread ? text(line.spread[k], plot.y.percent) : ""]));
      }
      return table(["series", plot.x_choices ? plot.x_choices[horizontal] : plot.x.label, plot.y.label, "±"], rows);
    },
    bars: (plot) => table([plot.x.label, ...plot.series.filter(visible).map((bar) => bar.name)],
      longestX(plot.series).map((name, k) =>
        [name, ...plot.series.filter(visible).map((bar) => text(bar.y[k], plot.y.percent))])),
    heat: (plot) => table([plot.labels[1], ...plot.rows], plot.columns.map((name, c) =>
      [name, ...plot.values.map((row) => text(row[c], plot.most === 1))])),
    points: (plot) => table(["series", "client", plot.x.label, plot.y.label], plot.series.filter(visible).flatMap((group) =>
      group.points.map(([x, y, label]) => [group.name, label, text(x, plot.percent), text(y, plot.percent)]))),
  };

  // ---- drawing
  const current = (plot) => (plot.type === "choices" ? plot.options[chosen.get(plot.id)] : plot);
  const height = (plot) => (plot.type === "heat" ? `${Math.max(11, Math.min(36, 7.5 + 1.35 * plot.rows.length))}rem` : "");
  function draw(outer) {
    const plot = current(outer);
    const place = document.getElementById(`plot-${outer.id}`);
    place.style.height = height(plot);
    if (plot.alt) place.setAttribute("aria-label", plot.alt);
    let chart = charts.get(outer.id);
    if (!chart) {
      const cells = plot.type === "heat" ? plot.rows.length * plot.columns.length : 0;
      chart = echarts.init(place, null, { renderer: cells > 4000 ? "canvas" : "svg" });
      charts.set(outer.id, chart);
      new ResizeObserver(() => chart.resize()).observe(place);
    }
    chart.resize();
    chart.setOption(kinds[plot.type](plot, place.clientWidth < 480, place.clientWidth), { notMerge: true });
    const description = document.querySelector(`#figure-${outer.id} .told`);
    if (description) description.textContent = plot.note || plot.alt;
    const details = document.querySelector(`#figure-${outer.id} details`);
    if (details.open) details.querySelector(".scroll").innerHTML = tables[plot.type](plot);
  }
  function drawAll() { data.plots.forEach(draw); }

  // ---- controls
  for (const plot of data.plots) {
    const figure = document.getElementById(`figure-${plot.id}`);
    figure.querySelector("details").addEventListener("toggle", () => draw(plot));
    if (plot.type !== "choices") continue;
    const names = Object.keys(plot.options);
    chosen.set(plot.id, names[0]);
    const controls = figure.querySelector(".controls");
    controls.innerHTML = `<label>${safe(plot.label)} <select>${names.map((name) => `<option>${safe(name)}</option>`).join("")}</select></label>`;
    controls.insertAdjacentHTML("afterend", '<p class="told" aria-live="polite"></p>');
    controls.querySelector("select").addEventListener("change", (event) => { chosen.set(plot.id, event.target.value); draw(plot); });
  }
  const methods = document.getElementById("methods");
  if (data.methods.length > 1) {
    methods.innerHTML = '<span class="name">Show</span>' + data.methods.map((method) =>
      `<button type="button" aria-pressed="true" data-method="${safe(method.name)}">` +
      `<span class="dot" style="background:${method.colour}"></span>${safe(method.name)}</button>`).join("");
    methods.addEventListener("click", (event) => {
      const pressed = event.target.closest("button");
      if (!pressed) return;
      const name = pressed.dataset.method;
      if (shown.has(name)) shown.delete(name); else shown.add(name);
      pressed.setAttribute("aria-pressed", String(shown.has(name)));
      drawAll();
    });
  }
  const axisBar = document.querySelector('[data-toolbar="x"]');
  if (axisBar) {
    axisBar.setAttribute("role", "group");
    axisBar.setAttribute("aria-label", "Horizontal axis");
    axisBar.innerHTML = '<span class="name">against</span>' + [["round", "rounds"], ["sent", "bytes sent"]].map(([key, name]) =>
      `<button type="button" aria-pressed="${key === horizontal}" data-axis="${key}">${name}</button>`).join("");
    axisBar.addEventListener("click", (event) => {
      const pressed = event.target.closest("button");
      if (!pressed) return;
      horizontal = pressed.dataset.axis;
      axisBar.querySelectorAll("button").forEach((choice) =>
        choice.setAttribute("aria-pressed", String(choice === pressed)));
      data.plots.filter((plot) => plot.x_choices).forEach(draw);
    });
  }
  button.addEventListener("click", () => { theme = root.dataset.theme === "dark" ? "light" : "dark"; applyTheme(); });
  wants.addEventListener("change", applyTheme);
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) { width = window.innerWidth; drawAll(); }
  });
  window.fedhb = { charts, data };
  applyTheme();
})();
