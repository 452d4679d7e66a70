// Starts the sections of the page, and hands them each state that arrives.
import * as add from "./add.js";
import * as compare from "./compare.js";
import { forgetOutage } from "./dom.js";
import { connect } from "./live.js";
import * as form from "./form.js";
import * as now from "./now.js";
import * as results from "./results.js";
import * as viewer from "./viewer.js";

add.start();
now.start();
viewer.start();
compare.start();
results.start();
connect((state) => {
  if (state.outage) return;
  now.show(state);
  form.offer(state.families);
  results.refresh(state.latest);
}, () => {
  forgetOutage();
  add.retry();
  results.recover();
});
